"""A run's events, sorted by kind, and the figures that follow from them."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from hpctrain.errors import HpctrainError
from hpctrain.run.directory import RunDirectory
from hpctrain.run.events import Event, attempts, kept, read_events
from hpctrain.run.events.kinds import (
    CheckpointEvent,
    EndEvent,
    EpochEvent,
    FaultEvent,
    LogEvent,
    OverlapEvent,
    RecoveredFaultEvent,
    RunEvent,
    StallEvent,
    StartEvent,
    StepEvent,
    StoppedEvent,
)

Kind = TypeVar("Kind", bound=Event)


@dataclass(frozen=True, kw_only=True)
class PastAttempt:
    """One start of a run and its outcome: events of these kinds, None until they happen.

    ``start`` is None too for ranks that were started by hand.
    """

    start: StartEvent | None
    faults: tuple[FaultEvent, ...]
    stalls: tuple[StallEvent, ...]
    stopped: StoppedEvent | None
    end: EndEvent | None

    @property
    def fatal(self) -> tuple[FaultEvent, ...]:
        """The faults from which the ranks could not recover."""
        return tuple(fault for fault in self.faults if not isinstance(fault, RecoveredFaultEvent))


@dataclass(frozen=True, kw_only=True)
class Record:
    """What one run recorded, each step and epoch once, however often the run was resumed.

    Attributes:
        run: the newest event of its kind, None until it happened.
        events: all of them without what was lost and done again, in order.
        steps, epochs, checkpoints, overlaps, logs: the events of these kinds, in order.
        attempts: the starts of the run, in order.
        last_time: when the last event happened, in seconds since the epoch.
    """

    run: RunEvent | None
    events: list[Event]
    steps: list[StepEvent]
    epochs: list[EpochEvent]
    checkpoints: list[CheckpointEvent]
    overlaps: list[OverlapEvent]
    logs: list[LogEvent]
    attempts: list[PastAttempt]
    last_time: float | None

    @classmethod
    def read(cls, directory: RunDirectory) -> Record:
        """Read the record of a run that may still be going on. Unknown kinds of events are left out.

        Raises:
            HpctrainError: the file is damaged; names the line.
        """
        return cls.of(read_events(directory.events) if directory.events.exists() else (), str(directory.events))

    @classmethod
    def of(cls, events: Iterable[Event], where: str = "events") -> Record:
        """The record of these events."""
        whole = kept(events)
        steps, run = of_kind(whole, StepEvent), last_of(whole, RunEvent)
        if steps and run is None:
            raise HpctrainError(f"{where}: there are steps, but no event 'run' that says of what")
        return cls(
            run=run,
            events=whole,
            steps=steps,
            epochs=of_kind(whole, EpochEvent),
            checkpoints=of_kind(whole, CheckpointEvent),
            overlaps=of_kind(whole, OverlapEvent),
            logs=of_kind(whole, LogEvent),
            attempts=past_attempts(whole),
            last_time=whole[-1].time if whole else None,
        )

    @property
    def faults(self) -> tuple[FaultEvent, ...]:
        """The faults that ended the last attempt."""
        return self.attempts[-1].fatal if self.attempts else ()

    @property
    def survived(self) -> list[FaultEvent]:
        """The faults of all attempts that the run recovered from by itself."""
        return survived(self.attempts)

    @property
    def survived_in(self) -> list[tuple[int, FaultEvent]]:
        """The faults of :attr:`survived`, each with its attempt's number, from 1."""
        return survived_in(self.attempts)

    @property
    def end(self) -> EndEvent | None:
        """The end of the last attempt; None until then."""
        return self.attempts[-1].end if self.attempts else None

    @property
    def by_epoch(self) -> bool:
        """Whether each step's epoch is known: true for a recipe, false for a script."""
        counts = (self.run.epochs, self.run.iterations_per_epoch) if self.run else (None,)
        return None not in (*counts, *(step.epoch for step in self.steps))

    @property
    def logged(self) -> dict[str, float | None]:
        """The last value of each name that a script logged."""
        return {name: value for event in self.logs for name, value in event.values.items()}

    @property
    def timed_steps(self) -> list[StepEvent]:
        """The steps that show the speed, without the first of each attempt, which also compiles and allocates."""
        begun = (after.iteration for attempt in self.attempts for after in (attempt.start, attempt.stopped) if after)
        first = {1, *(iteration + 1 for iteration in begun)}
        return [step for step in self.steps if step.iteration not in first] or self.steps


def past_attempts(events: Iterable[Event]) -> list[PastAttempt]:
    """Divide the events of a run into its attempts."""
    return [
        PastAttempt(
            start=last_of(part, StartEvent),
            faults=tuple(of_kind(part, FaultEvent)),
            stalls=tuple(of_kind(part, StallEvent)),
            stopped=last_of(part, StoppedEvent),
            end=last_of(part, EndEvent),
        )
        for part in attempts(events)
    ]


def survived(attempts: Sequence[PastAttempt]) -> list[FaultEvent]:
    """The faults that a run recovered from by itself.

    Those are ranks without which the others went on, and what ended an attempt that was no end of the run: its launcher
    began the next one.
    """
    return [fault for _, fault in survived_in(attempts)]


def survived_in(attempts: Sequence[PastAttempt]) -> list[tuple[int, FaultEvent]]:
    """The faults of :func:`survived`, each with its attempt's number, from 1."""
    return [
        (number, fault)
        for number, (attempt, further) in enumerate(itertools.zip_longest(attempts, attempts[1:]), start=1)
        for fault in attempt.faults
        if isinstance(fault, RecoveredFaultEvent) or (further and not attempt.end)
    ]


def of_kind(events: Iterable[Event], kind: type[Kind]) -> list[Kind]:
    """The events of a kind, in order."""
    return [event for event in events if isinstance(event, kind)]


def last_of(events: Sequence[Event], kind: type[Kind]) -> Kind | None:
    """The last event of a kind; None without one."""
    return next((event for event in reversed(events) if isinstance(event, kind)), None)


def samples_per_s(steps: Sequence[StepEvent]) -> float | None:
    """The throughput of the steps over all ranks; None for a script, whose samples are not known."""
    seconds = sum(step.seconds for step in steps)
    samples = [step.samples for step in steps if step.samples is not None]
    return sum(samples) / seconds if seconds and len(samples) == len(steps) else None


def communication_share(steps: Sequence[StepEvent]) -> float | None:
    """The share of communication in the steps' time, 0 to 1; None if it was not measured."""
    return _share((step.communication_seconds, step.seconds) for step in steps)


def communication_bytes(steps: Sequence[StepEvent]) -> int | None:
    """What the writing rank gave to reductions in these steps, before compression; None if that was not counted."""
    counted = [step.communication_bytes for step in steps]
    known = [each for each in counted if each is not None]
    return sum(known) if known and len(known) == len(counted) else None


def data_share(steps: Sequence[StepEvent]) -> float | None:
    """The share of waiting for samples in the steps' time, 0 to 1; None if it was not measured."""
    return _share((step.data_seconds, step.seconds) for step in steps)


def _share(times: Iterable[tuple[float | None, float]]) -> float | None:
    """The first seconds over the second ones, of those steps where the first were measured."""
    measured = [(part, seconds) for part, seconds in times if part is not None]
    seconds = sum(seconds for _, seconds in measured)
    return sum(part for part, _ in measured) / seconds if seconds else None
