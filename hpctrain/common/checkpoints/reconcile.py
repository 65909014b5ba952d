"""Compares the checkpoints that a run's events tell of with those on the disk."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from hpctrain.common.checkpoints.layout import iterations
from hpctrain.common.run.events import Event
from hpctrain.common.run.events.kinds import CheckpointEvent, StartEvent

GONE = "gone, though its event says that it was written, and no later one that it was deleted"


def missing(folder: Path, events: Iterable[Event]) -> list[int]:
    """The iterations of checkpoints that were there by the last word of the events and are not, the oldest first.

    What a run deletes by its own rules is not missing, and neither is what an attempt has passed over already.

    Args:
        events: the starts and checkpoints at least, in order.
    """
    expected: set[int] = set()
    for event in events:
        if isinstance(event, StartEvent):
            expected = {iteration for iteration in expected if iteration <= event.iteration}
        elif isinstance(event, CheckpointEvent):
            # An event without a list of the kept ones proves only its own checkpoint.
            expected = {*(event.kept or ()), event.iteration}
    there = set(iterations(folder))
    if there and max(there) > max(expected, default=0):
        # A checkpoint newer than all events: others were deleted for it, which no event says.
        return []
    return sorted(expected - there)


def missing_text(path: Path, iteration: int) -> str:
    """The words for a missing checkpoint when a run goes on from an earlier one, or from its beginning (0)."""
    return f"{path} is {GONE}; the run goes on from {f'step {iteration}' if iteration else 'its beginning'}"
