"""What went wrong, in one line: a fault, a stall, images that are broken."""

from __future__ import annotations

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
    # What a whole host does has no rank.
    who = "" if fault["rank"] is None else f"rank {fault['rank']} ({fault['host']}): "
    return f"{who}{fault['message']}"


def stall_line(stall: Event) -> str:
    """The line of an event ``stall``."""
    step = "" if stall.get("iteration") is None else f" of step {stall['iteration']}"
    return (
        f"rank {stall['rank']} ({stall['host']}) stalled: others have waited {stall['seconds']:.0f} s for it in "
        f"{stall['waiting_for']}{step}"
    )


def broken_images_line(broken: Event) -> str:
    """The line of an event ``broken_images``."""
    count, names = broken["count"], broken["names"]
    more = "" if count == len(names) else f" and {count - len(names)} more"
    images = "1 image" if count == 1 else f"{count} images"
    return f"epoch {broken['epoch']}: {images} could not be decoded and took no part: {', '.join(names)}{more}"
