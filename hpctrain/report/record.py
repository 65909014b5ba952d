"""A run's events, sorted by kind, and the figures that follow from them."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from hpctrain.errors import HpctrainError
from hpctrain.events import Event, attempts, kept, read_events
from hpctrain.report.faults import was_healed
from hpctrain.rundir import RunDirectory


@dataclass(frozen=True, kw_only=True)
class PastAttempt:
    """One start of a run and what came of it: the events of these kinds, empty until they happened.

    ``start`` is empty too for ranks that were started by hand.
    """

    start: Event
    faults: tuple[Event, ...]
    stalls: tuple[Event, ...]
    stopped: Event
    end: Event

    @property
    def fatal(self) -> tuple[Event, ...]:
        """The faults that the ranks could not go on from."""
        return tuple(fault for fault in self.faults if not was_healed(fault))


@dataclass(frozen=True, kw_only=True)
class Record:
    """What one run recorded, each step and epoch once, however often the run was resumed.

    Attributes:
        run: the newest event of its kind, empty until it happened.
        events: all of them without what was lost and done again, in order.
        steps, epochs, checkpoints, overlaps, logs: the events of these kinds, in order.
        attempts: the starts of the run, in order.
        last_time: when the last event happened, in seconds since the epoch.
    """

    run: Event
    events: list[Event]
    steps: list[Event]
    epochs: list[Event]
    checkpoints: list[Event]
    overlaps: list[Event]
    logs: list[Event]
    attempts: list[PastAttempt]
    last_time: float | None

    @classmethod
    def read(cls, directory: RunDirectory) -> Record:
        """The record of a run that may still be going on. Kinds that are not known are left out.

        Raises:
            HpctrainError: the file is damaged; names the line.
        """
        return cls.of(read_events(directory.events) if directory.events.exists() else (), str(directory.events))

    @classmethod
    def of(cls, events: Iterable[Event], where: str = "events") -> Record:
        """The record of these events."""
        whole = kept(events)
        kinds: dict[str, list[Event]] = defaultdict(list)
        for event in whole:
            kinds[event["event"]].append(event)
        if kinds["step"] and not kinds["run"]:
            raise HpctrainError(f"{where}: there are steps, but no event 'run' that says of what")
        return cls(
            run=(kinds["run"] or [{}])[-1],
            events=whole,
            steps=kinds["step"],
            epochs=kinds["epoch"],
            checkpoints=kinds["checkpoint"],
            overlaps=kinds["overlap"],
            logs=kinds["log"],
            attempts=past_attempts(whole),
            last_time=whole[-1]["time"] if whole else None,
        )

    @property
    def faults(self) -> tuple[Event, ...]:
        """What ended the last attempt."""
        return self.attempts[-1].fatal if self.attempts else ()

    @property
    def survived(self) -> list[Event]:
        """The faults of all attempts that the run got over by itself."""
        return survived(self.attempts)

    @property
    def survived_in(self) -> list[tuple[int, Event]]:
        """The same, each with its attempt's number, from 1."""
        return survived_in(self.attempts)

    @property
    def end(self) -> Event:
        """The end of the last attempt; empty until then."""
        return self.attempts[-1].end if self.attempts else {}

    @property
    def by_epoch(self) -> bool:
        """Whether it is known of each step in which epoch it was, as of a recipe's, and not of a script's."""
        counts = (self.run.get("epochs"), self.run.get("iterations_per_epoch"))
        return None not in (*counts, *(step["epoch"] for step in self.steps))

    @property
    def logged(self) -> dict[str, float | None]:
        """The last value of each name that a script logged."""
        return {name: value for event in self.logs for name, value in event["values"].items()}

    @property
    def timed_steps(self) -> list[Event]:
        """The steps that tell the run's speed: the first one of an attempt also compiles, traces and allocates."""
        first = {1, *(attempt.start["iteration"] + 1 for attempt in self.attempts if attempt.start)}
        return [step for step in self.steps if step["iteration"] not in first] or self.steps


def past_attempts(events: Iterable[Event]) -> list[PastAttempt]:
    """The events of a run cut into its attempts."""
    return [
        PastAttempt(
            start=_last(part, "start"),
            faults=tuple(event for event in part if event["event"] == "fault"),
            stalls=tuple(event for event in part if event["event"] == "stall"),
            stopped=_last(part, "stopped"),
            end=_last(part, "end"),
        )
        for part in attempts(events)
    ]


def survived(attempts: Sequence[PastAttempt]) -> list[Event]:
    """The faults that a run got over by itself.

    Those are ranks without which the others went on, and what ended an attempt that was no end of the run: its launcher
    began the next one.
    """
    return [fault for _, fault in survived_in(attempts)]


def survived_in(attempts: Sequence[PastAttempt]) -> list[tuple[int, Event]]:
    """The faults of :func:`survived`, each with its attempt's number, from 1."""
    return [
        (number, fault)
        for number, (attempt, further) in enumerate(itertools.zip_longest(attempts, attempts[1:]), start=1)
        for fault in attempt.faults
        if was_healed(fault) or (further and not attempt.end)
    ]


def _last(events: Sequence[Event], kind: str) -> Event:
    return next((event for event in reversed(events) if event["event"] == kind), {})


def samples_per_s(steps: Sequence[Event]) -> float | None:
    """Samples of all ranks over the seconds of the steps; None for a script's, whose samples are not known."""
    seconds = sum(step["seconds"] for step in steps)
    if not seconds or any(step["samples"] is None for step in steps):
        return None
    speed: float = sum(step["samples"] for step in steps) / seconds
    return speed


def communication_share(steps: Sequence[Event]) -> float | None:
    """The part of the steps' time that went into communication, 0 to 1; None where it was not measured."""
    measured = [step for step in steps if step["communication_seconds"] is not None]
    seconds = sum(step["seconds"] for step in measured)
    return sum(step["communication_seconds"] for step in measured) / seconds if seconds else None


def data_share(steps: Sequence[Event]) -> float | None:
    """The part of the steps' time that went into waiting for samples, 0 to 1; None where it was not measured."""
    measured = [step for step in steps if step.get("data_seconds") is not None]
    seconds = sum(step["seconds"] for step in measured)
    return sum(step["data_seconds"] for step in measured) / seconds if seconds else None
