"""A run's events, sorted by kind, and the figures that follow from them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from hpctrain.errors import HpctrainError
from hpctrain.events import Event, read_events
from hpctrain.rundir import RunDirectory


@dataclass(frozen=True, kw_only=True)
class Record:
    """What one run recorded. All of it is empty for a script that emits no events.

    Attributes:
        run, end: the first and the last event of the run, empty until they happened.
        steps, epochs, overlaps, faults: the events of these kinds, in order.
        last_time: when the last event happened, in seconds since the epoch.
    """

    run: Event
    steps: list[Event]
    epochs: list[Event]
    overlaps: list[Event]
    faults: list[Event]
    end: Event
    last_time: float | None

    @classmethod
    def read(cls, directory: RunDirectory) -> Record:
        """The record of a run that may still be going on. Kinds that are not known are left out.

        Raises:
            HpctrainError: the file is damaged; names the line.
        """
        kinds: dict[str, list[Event]] = defaultdict(list)
        last_time = None
        for event in read_events(directory.events) if directory.events.exists() else ():
            kinds[event["event"]].append(event)
            last_time = event["time"]
        if kinds["step"] and not kinds["run"]:
            raise HpctrainError(f"{directory.events}: there are steps, but no event 'run' that says of what")
        return cls(
            run=(kinds["run"] or [{}])[-1],
            steps=kinds["step"],
            epochs=kinds["epoch"],
            overlaps=kinds["overlap"],
            faults=kinds["fault"],
            end=(kinds["end"] or [{}])[-1],
            last_time=last_time,
        )

    @property
    def timed_steps(self) -> list[Event]:
        """The steps that tell the run's speed: the first one also compiles, traces and allocates."""
        return self.steps[1:] or self.steps


def samples_per_s(steps: Sequence[Event]) -> float | None:
    """Samples of all ranks over the seconds of the steps."""
    seconds = sum(step["seconds"] for step in steps)
    return sum(step["samples"] for step in steps) / seconds if seconds else None


def communication_share(steps: Sequence[Event]) -> float | None:
    """The part of the steps' time that went into communication, 0 to 1; None where it was not measured."""
    measured = [step for step in steps if step["communication_seconds"] is not None]
    seconds = sum(step["seconds"] for step in measured)
    return sum(step["communication_seconds"] for step in measured) / seconds if seconds else None
