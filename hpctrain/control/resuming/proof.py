"""Whether a resumed run is the one that was begun: its plan and its script, by their hashes in the events.

The plan holds the recipe. Of a script only the file itself is hashed, and nothing that it imports.
"""

from __future__ import annotations

from collections.abc import Sequence

from hpctrain.common.errors import HpctrainError
from hpctrain.common.files.regular import sha256
from hpctrain.common.run.directory import RunDirectory, plan_sha256, resume_command
from hpctrain.common.run.events import Event, EventWriter
from hpctrain.common.run.events.kinds import PlanEvent, StartEvent
from hpctrain.common.run.plan import Plan


def script_sha256(plan: Plan) -> str | None:
    """The hash of a plan's script; None for a recipe, and for a script that cannot be read here."""
    if plan.script is None:
        return None
    try:
        return sha256(plan.script.path)[0]
    except OSError:
        # The script may be in a container, for example.
        return None


def changed_script(events: Sequence[Event], now: str | None) -> tuple[str, str] | None:
    """The script's hash in the last attempt and now, if both are known and differ."""
    starts = [event.script for event in events if isinstance(event, StartEvent)]
    before = starts[-1] if starts else None
    return (before, now) if before and now and before != now else None


def require_own_plan(directory: RunDirectory, events: Sequence[Event], *, accept: bool) -> dict[str, tuple[str, str]]:
    """Refuse a ``plan.json`` that something else than hpctrain has changed since the last attempt, as a disk can.

    Args:
        events: in order, with at least the run's start and plan events.
        accept: continue with the changed plan.

    Returns:
        The old and the new hash, by the name of the file, of a changed plan that is accepted; else empty.

    Raises:
        HpctrainError: it was changed.
    """
    wanted: set[str | None] = set()
    for event in events:
        if isinstance(event, StartEvent):
            wanted = {event.plan}
        elif isinstance(event, PlanEvent):
            wanted.add(event.sha256)
    now = sha256(directory.plan)[0]
    # Without a recorded attempt nothing is known.
    if now in wanted or not wanted - {None}:
        return {}
    if accept:
        return {directory.plan.name: (", ".join(sorted(known[:12] for known in wanted if known)), now[:12])}
    raise HpctrainError(
        "HT-run-plan-changed",
        "{path} was changed by something else than hpctrain since the last attempt",
        f"restore it, or go on with it as it is: {resume_command(directory, '--accept-changes')}; "
        "--set KEY=VALUE --accept-changes changes a value of the recipe deliberately",
        path=directory.plan,
    )


def replace_plan(directory: RunDirectory, plan: Plan) -> None:
    """Begin a further attempt with a plan, and record its hash before the file is replaced."""
    new = plan_sha256(plan)
    # A run that was only submitted has no events yet.
    if directory.events.exists() and new != sha256(directory.plan)[0]:
        with EventWriter(directory.events) as events:
            events.emit(PlanEvent(sha256=new))
            events.synchronise()
    directory.begin_attempt(plan)
