"""One-line texts about trouble: faults, stalls, damaged checkpoints, changed settings."""

from __future__ import annotations

from collections.abc import Sequence

from hpctrain.common.files.printable import shortened
from hpctrain.common.run.events import Event
from hpctrain.common.run.events.kinds import (
    BrokenImagesEvent,
    ChangedEvent,
    DamagedEvent,
    FaultEvent,
    NonFiniteEvent,
    RecoveredFaultEvent,
    SlowRankEvent,
    StallEvent,
)


def first_of(lines: Sequence[str], most: int) -> list[str]:
    """The first of many lines, and how many more there are."""
    return [*lines[:most], *([f"and {len(lines) - most:,} more"] if len(lines) > most else [])]


def fault_line(fault: FaultEvent) -> str:
    """The line of a fault, which also says whether the other ranks went on."""
    if isinstance(fault, RecoveredFaultEvent):
        samples = fault.samples_affected
        return (
            f"rank {fault.rank} ({fault.host}) was lost at step {fault.iteration}; the other {fault.ranks} "
            f"went on after {fault.recovery_seconds:.2g} s, {samples or 'no'} sample{'' if samples == 1 else 's'} "
            "affected"
        )
    # A host's fault has no rank, and the launcher's messages about a rank already name it.
    complete = fault.rank is None or fault.message.startswith(f"rank {fault.rank} ")
    return fault.message if complete else f"rank {fault.rank} ({fault.host}): {fault.message}"


def stall_line(stall: StallEvent) -> str:
    """The line of a stall: which rank is waited for, and where."""
    step = "" if stall.iteration is None else f" of step {stall.iteration}"
    return (
        f"rank {stall.rank} ({stall.host}) stalled: others have been waiting {stall.seconds:.0f} s for it in "
        f"{stall.waiting_for}{step}"
    )


def damaged_line(damaged: DamagedEvent) -> str:
    """The line of a damaged checkpoint, with its new name."""
    return f"checkpoint {damaged.path} was damaged and skipped: {damaged.fault}; it is now {damaged.kept_as}"


# The order in which the report's page lists them.
_TROUBLE = (DamagedEvent, ChangedEvent, StallEvent, SlowRankEvent, BrokenImagesEvent, NonFiniteEvent)


def event_line(event: Event) -> str | None:
    """The line of an event; None for kinds without one."""
    match event:
        case DamagedEvent():
            return damaged_line(event)
        case ChangedEvent(differences=differences):
            values = (f"{key} {old} → {new}" for key, (old, new) in differences.items())
            return f"the run went on with other settings: {shortened(', '.join(values))}"
        case FaultEvent():
            return fault_line(event)
        case StallEvent():
            return stall_line(event)
        case SlowRankEvent():
            return event.text
        case BrokenImagesEvent(epoch=epoch, count=count, names=names):
            more = "" if count == len(names) else f" and {count - len(names)} more"
            images = "1 image" if count == 1 else f"{count} images"
            return f"epoch {epoch}: {images} could not be decoded and took no part: {shortened(', '.join(names))}{more}"
        case NonFiniteEvent():
            went_on = {"skip": "its update was left out", "stop": "the run ends"}
            where = f" on rank {', '.join(map(str, event.ranks))}" if event.ranks else ""
            return f"step {event.iteration} had numbers that are not finite{shortened(where)}: {went_on[event.rule]}"
    return None


def trouble_lines(events: Sequence[Event]) -> list[str]:
    """The lines of everything except faults, kind by kind."""
    lines = [event_line(event) for kind in _TROUBLE for event in events if isinstance(event, kind)]
    return [*filter(None, lines)]
