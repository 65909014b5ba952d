"""One-line texts about trouble: faults, stalls, damaged checkpoints, changed settings."""

from __future__ import annotations

from collections.abc import Sequence

from hpctrain.common.files.printable import shortened
from hpctrain.common.run.events import Event
from hpctrain.common.run.events.kinds import (
    ChangedEvent,
    DamagedEvent,
    ExcludedEvent,
    FaultEvent,
    NonFiniteEvent,
    RecoveredFaultEvent,
    SlowRankEvent,
    StallEvent,
)


def first_of(lines: Sequence[str], most: int) -> list[str]:
    """The first of many lines, and how many more there are."""
    return [*lines[:most], *([f"and {len(lines) - most:,} more"] if len(lines) > most else [])]


def event_line(event: Event) -> str | None:
    """The line of an event; None for kinds without one."""
    match event:
        case DamagedEvent(path=path, fault=fault, kept_as=kept_as):
            return f"checkpoint {path} was damaged and skipped: {fault}; it is now {kept_as}"
        case ChangedEvent(differences=differences):
            values = (f"{key} {old} → {new}" for key, (old, new) in differences.items())
            return f"the run went on with other settings: {shortened(', '.join(values))}"
        case RecoveredFaultEvent(samples_affected=samples):
            return (
                f"rank {event.rank} ({event.host}) was lost at step {event.iteration}; the other {event.ranks} "
                f"went on after {event.recovery_seconds:.2g} s, {samples or 'no'} sample{'' if samples == 1 else 's'} "
                "affected"
            )
        case FaultEvent(rank=rank, host=host, message=message):
            # A host's fault has no rank, and the launcher's messages about a rank already name it.
            complete = rank is None or message.startswith(f"rank {rank} ")
            return message if complete else f"rank {rank} ({host}): {message}"
        case StallEvent(rank=rank, host=host, iteration=iteration):
            step = "" if iteration is None else f" of step {iteration}"
            return (
                f"rank {rank} ({host}) stalled: others have been waiting {event.seconds:.0f} s for it in "
                f"{event.waiting_for}{step}"
            )
        case SlowRankEvent():
            return event.text
        case ExcludedEvent():
            return f"{event.host} is left out of the run's jobs for a day: {event.message}"
        case NonFiniteEvent():
            went_on = {"skip": "its update was left out", "stop": "the run ends"}
            where = f" on rank {', '.join(map(str, event.ranks))}" if event.ranks else ""
            return f"step {event.iteration} had numbers that are not finite{shortened(where)}: {went_on[event.rule]}"
    return None
