"""What went wrong or is not as it was, in one line: a fault, a stall, a damaged checkpoint, other settings."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from hpctrain.events import Event


def was_healed(fault: Event) -> bool:
    """Whether the other ranks went on without the one that died."""
    return "recovery_seconds" in fault


def fault_line(fault: Event) -> str:
    """The line of an event ``fault``."""
    if was_healed(fault):
        samples = fault["samples_affected"]
        return (
            f"rank {fault['rank']} ({fault['host']}) was lost at step {fault['iteration']}; the other {fault['ranks']} "
            f"went on after {fault['recovery_seconds']:.2g} s, {samples or 'no'} sample{'' if samples == 1 else 's'} "
            "affected"
        )
    # What a whole host does has no rank, and what the launcher saw of a rank says which one itself.
    said = fault["rank"] is None or fault["message"].startswith(f"rank {fault['rank']} ")
    return fault["message"] if said else f"rank {fault['rank']} ({fault['host']}): {fault['message']}"


def stall_line(stall: Event) -> str:
    """The line of an event ``stall``."""
    step = "" if stall.get("iteration") is None else f" of step {stall['iteration']}"
    return (
        f"rank {stall['rank']} ({stall['host']}) stalled: others have waited {stall['seconds']:.0f} s for it in "
        f"{stall['waiting_for']}{step}"
    )


def non_finite_line(event: Event) -> str:
    """The line of an event ``non_finite``."""
    went_on = {
        "skip": "its update was left out",
        "roll_back": f"the run goes on after it with the parameters of step {event['to']}",
        "stop": "the run ends",
    }
    where = f" on rank {', '.join(map(str, event['ranks']))}" if event["ranks"] else ""
    return f"step {event['iteration']} had numbers that are not finite{where}: {went_on[event['rule']]}"


def spike_line(spikes: Sequence[Event]) -> str:
    """The line of events ``spike`` of steps in a row."""
    first, last = spikes[0], spikes[-1]
    steps = f"step {first['iteration']}" if first is last else f"steps {first['iteration']} to {last['iteration']}"
    highest = max(spike["loss"] for spike in spikes)
    return f"{steps}: the loss was up to {highest:.4g}, where {first['median']:.4g} was the median before"


def in_a_row(spikes: Iterable[Event]) -> list[list[Event]]:
    """Events ``spike`` in groups of steps that follow each other."""
    groups: list[list[Event]] = []
    for spike in spikes:
        if groups and spike["iteration"] == groups[-1][-1]["iteration"] + 1:
            groups[-1].append(spike)
        else:
            groups.append([spike])
    return groups


def broken_images_line(broken: Event) -> str:
    """The line of an event ``broken_images``."""
    count, names = broken["count"], broken["names"]
    more = "" if count == len(names) else f" and {count - len(names)} more"
    images = "1 image" if count == 1 else f"{count} images"
    return f"epoch {broken['epoch']}: {images} could not be decoded and took no part: {', '.join(names)}{more}"


def damaged_line(damaged: Event) -> str:
    """The line of an event ``damaged``."""
    return (
        f"checkpoint {damaged['path']} was damaged, and passed over: {damaged['fault']}; it is {damaged['kept_as']} now"
    )


def changed_line(changed: Event) -> str:
    """The line of an event ``changed``."""
    values = (f"{key} {old} → {new}" for key, (old, new) in changed["differences"].items())
    return f"the run went on with other settings: {', '.join(values)}"


LINES: Mapping[str, Callable[[Event], str]] = {
    "damaged": damaged_line,
    "changed": changed_line,
    "fault": fault_line,
    "stall": stall_line,
    "broken_images": broken_images_line,
    "non_finite": non_finite_line,
}
"""What makes the line of an event, by the kinds that have one each."""


def trouble_lines(events: Sequence[Event]) -> list[str]:
    """The lines of all but the faults, of which the reader wants to know whether they ended the run; kind by kind."""
    kinds = [kind for kind in LINES if kind != "fault"]
    lines = [LINES[kind](event) for kind in kinds for event in events if event["event"] == kind]
    return [*lines, *map(spike_line, in_a_row(event for event in events if event["event"] == "spike"))]
