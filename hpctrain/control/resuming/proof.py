"""Whether a resumed run is the one that was begun: its plan and its script, by their hashes in the events.

The plan holds the recipe. Of a script only the file itself is hashed, and nothing that it imports.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hpctrain.common.checkpoints.layout import checkpoint_path, iterations
from hpctrain.common.checkpoints.manifest import read_manifest
from hpctrain.common.errors import HpctrainError
from hpctrain.common.files.regular import sha256
from hpctrain.common.recipes.difference import flat
from hpctrain.common.run.directory import RunDirectory, plan_sha256
from hpctrain.common.run.events import Event, EventWriter
from hpctrain.common.run.events.kinds import PlanEvent, StartEvent
from hpctrain.common.run.plan import Plan
from hpctrain.common.run.resuming import resume_command

_SHOWN = 20


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


def require_own_plan(
    directory: RunDirectory, events: Sequence[Event], plan: Plan, *, accept: bool
) -> dict[str, tuple[Any, Any]]:
    """Refuse a ``plan.json`` that something else than hpctrain has changed since the last attempt.

    Args:
        events: in order, with at least the run's start and plan events.
        plan: the plan that is in the file now.
        accept: continue with the changed plan.

    Returns:
        The accepted differences: the old and the new value by dotted key; empty if hpctrain wrote the plan.

    Raises:
        HpctrainError: it was changed; shows the differences from the plan in the newest checkpoint.
    """
    wanted: set[str | None] = set()
    for event in events:
        if isinstance(event, StartEvent):
            wanted = {event.plan}
        elif isinstance(event, PlanEvent):
            wanted.add(event.sha256)
    found = sha256(directory.plan)[0]
    # Without a recorded attempt only the checkpoint's recipe is known, and not the whole plan.
    known = bool(wanted - {None})
    if found in wanted:
        return {}
    place, differences = _differences(directory, plan, whole=known)
    if not known and not differences:
        return {}
    if accept:
        was = ", ".join(sorted(each[:12] for each in wanted if each))
        return differences or {directory.plan.name: (was, found[:12])}
    rows = [f"  {key}: {old} there, {new} here" for key, (old, new) in list(differences.items())[:_SHOWN]]
    if left := len(differences) - len(rows):
        rows.append(f"  and {left} more")
    shown = [f"differences from the plan in {place}:", *rows] if rows else []
    raise HpctrainError(
        "HT-run-plan-changed",
        "{path} was changed by something else than hpctrain since the last attempt{shown}",
        f"restore it, or go on with it as it is: {resume_command(directory, '--accept-changes')}; "
        "--set KEY=VALUE --accept-changes changes a value of the recipe deliberately",
        path=directory.plan,
        shown="".join(f"\n{line}" for line in shown),
        differences=differences,
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


def _differences(directory: RunDirectory, plan: Plan, *, whole: bool) -> tuple[str, dict[str, tuple[Any, Any]]]:
    """The newest readable checkpoint, and where the plan differs from its plan, ``whole`` or only in the recipe.

    Keys of the recipe are without the prefix ``recipe.``, as on the command line.
    """
    for iteration in reversed(iterations(directory.checkpoints)):
        path = checkpoint_path(directory.checkpoints, iteration)
        try:
            before = _values(read_manifest(path).plan, whole=whole)
        except HpctrainError:
            continue
        now = _values(plan.model_dump(mode="json"), whole=whole)
        return str(path), {
            key.removeprefix("recipe."): (before.get(key), now.get(key))
            for key in dict.fromkeys([*before, *now])
            if before.get(key) != now.get(key)
        }
    return "", {}


def _values(plan: Mapping[str, Any], *, whole: bool) -> dict[str, Any]:
    return {key: value for key, value in flat(plan) if whole or key.startswith("recipe.")}
