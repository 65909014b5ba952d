"""A run's events, sorted by kind, and the figures that follow from them."""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from hpctrain.common.errors import HpctrainError
from hpctrain.common.run.directory import RunDirectory
from hpctrain.common.run.events import Event, EventsFile, attempts, kept
from hpctrain.common.run.events.kinds import (
    CheckpointEvent,
    EndEvent,
    EnergyEvent,
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
from hpctrain.common.run.events.reader import Events

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


class StepTotals:
    """What some steps took altogether.

    Attributes:
        count: how many.
        seconds: of all.
        samples: of all ranks; None for a script, whose samples are not known.
        communication_bytes: what the writing rank gave to reductions, before compression; None if not counted.
    """

    def __init__(self, steps: Iterable[StepEvent] = ()) -> None:
        self.count = 0
        self.seconds = 0.0
        self.samples: int | None = 0
        self.communication_bytes: int | None = 0
        # Of those that were measured: the part, and the steps' whole time.
        self._communication = self._communication_of = 0.0
        self._data = self._data_of = 0.0
        for step in steps:
            self.add(step)

    def add(self, step: StepEvent) -> None:
        """Take in one more."""
        self.count += 1
        self.seconds += step.seconds
        self.samples = None if self.samples is None or step.samples is None else self.samples + step.samples
        given, each = self.communication_bytes, step.communication_bytes
        self.communication_bytes = None if given is None or each is None else given + each
        if step.communication_seconds is not None:
            self._communication += step.communication_seconds
            self._communication_of += step.seconds
        if step.data_seconds is not None:
            self._data += step.data_seconds
            self._data_of += step.seconds

    @property
    def samples_per_s(self) -> float | None:
        """The throughput over all ranks; None for a script, whose samples are not known."""
        return self.samples / self.seconds if self.seconds and self.samples is not None else None

    @property
    def communication_share(self) -> float | None:
        """The share of communication in the steps' time, 0 to 1; None if it was not measured."""
        return self._communication / self._communication_of if self._communication_of else None

    @property
    def data_share(self) -> float | None:
        """The share of waiting for samples in the steps' time, 0 to 1; None if it was not measured."""
        return self._data / self._data_of if self._data_of else None


@dataclass(frozen=True, kw_only=True)
class Record:
    """What one run recorded, each step and epoch once, however often the run was resumed.

    Steps and what a script logs are not in it, as a long run has too many: their totals are, and :meth:`steps` and
    :meth:`logs` read them again.

    Attributes:
        run: the newest event of its kind, None until it happened.
        events: without steps and logs, and without what was lost and done again, in order.
        epochs, checkpoints, overlaps: the events of these kinds, in order.
        attempts: the starts of the run, in order.
        last_time: when the last event happened, in seconds since the epoch.
        totals: of all steps.
        timed: of those that show the speed, without the first of each attempt, which also compiles and allocates.
        durations: of the timed steps, in seconds.
        metered: the totals of the steps up to the last reading of energy.
        epoch_ends: the last step of each epoch.
        by_epoch: whether each step's epoch is known: true for a recipe, false for a script.
        first_steps: the steps that are not timed, by their numbers.
        logged: the last value of each name that a script logged.
        logged_counts: how often each name was logged.
        source: the run's events, to be read again.
    """

    run: RunEvent | None
    events: Sequence[Event]
    epochs: list[EpochEvent]
    checkpoints: list[CheckpointEvent]
    overlaps: list[OverlapEvent]
    attempts: list[PastAttempt]
    last_time: float | None
    totals: StepTotals
    timed: StepTotals
    durations: Sequence[float]
    metered: StepTotals
    epoch_ends: dict[int, int]
    by_epoch: bool
    first_steps: set[int]
    logged: dict[str, float | None]
    logged_counts: dict[str, int]
    source: Events

    @classmethod
    def read(cls, directory: RunDirectory) -> Record:
        """Read the record of a run that may still be going on. Unknown kinds of events are left out.

        Raises:
            HpctrainError: the file is damaged; names the line.
        """
        return cls.of(EventsFile(directory.events), str(directory.events))

    @classmethod
    def of(cls, given: EventsFile | Iterable[Event], where: str = "events") -> Record:
        """The record of these events."""
        source = given if isinstance(given, EventsFile) else [*given]
        few = kept(source.outline() if isinstance(source, EventsFile) else source)
        events = [event for event in few if not isinstance(event, StepEvent | LogEvent)]
        past, run, last_energy = past_attempts(events), last_of(events, RunEvent), last_of(events, EnergyEvent)
        first = _first_steps(past)
        sums = _Sums(first, last_energy.iteration if last_energy else 0)
        for event in kept(source):
            sums.add(event)
        if sums.totals.count and run is None:
            raise HpctrainError(f"{where}: there are steps, but no event 'run' that says of what")
        counts = (run.epochs, run.iterations_per_epoch) if run else (None,)
        return cls(
            run=run,
            events=events,
            epochs=of_kind(events, EpochEvent),
            checkpoints=of_kind(events, CheckpointEvent),
            overlaps=of_kind(events, OverlapEvent),
            attempts=past,
            last_time=sums.last_time,
            totals=sums.totals,
            timed=sums.timed if sums.timed.count else sums.totals,
            durations=sums.durations or sums.first_durations,
            first_steps=first if sums.timed.count else set(),
            metered=sums.metered,
            epoch_ends=sums.epoch_ends,
            by_epoch=None not in (*counts, sums.epochs_known or None),
            logged=sums.logged,
            logged_counts=sums.logged_counts,
            source=source,
        )

    def steps(self) -> Iterator[StepEvent]:
        """All steps, in order."""
        return (event for event in kept(self.source) if isinstance(event, StepEvent))

    def logs(self) -> Iterator[LogEvent]:
        """The events of what a script logged, in order."""
        return (event for event in kept(self.source) if isinstance(event, LogEvent))

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


class _Sums:
    """What a record has of the steps and logs of a run, in one pass.

    Args:
        first: the steps that are not timed.
        energy: the last step whose energy was read.
    """

    def __init__(self, first: set[int], energy: int) -> None:
        self.totals, self.timed, self.metered = StepTotals(), StepTotals(), StepTotals()
        # Of all that a record has, these alone grow with the steps, by 8 bytes each: the median needs them.
        self.durations, self.first_durations = array("d"), array("d")
        self.epoch_ends: dict[int, int] = {}
        self.epochs_known = True
        self.logged: dict[str, float | None] = {}
        self.logged_counts: dict[str, int] = {}
        self.last_time: float | None = None
        self._first = first
        self._energy = energy

    def add(self, event: Event) -> None:
        self.last_time = event.time
        if isinstance(event, StepEvent):
            self._add(event)
        elif isinstance(event, LogEvent):
            self.logged |= event.values
            for name in event.values:
                self.logged_counts[name] = self.logged_counts.get(name, 0) + 1

    def _add(self, step: StepEvent) -> None:
        self.totals.add(step)
        if step.iteration in self._first:
            self.first_durations.append(step.seconds)
        else:
            self.timed.add(step)
            self.durations.append(step.seconds)
        if step.iteration <= self._energy:
            self.metered.add(step)
        if step.epoch is None:
            self.epochs_known = False
        else:
            self.epoch_ends[step.epoch] = step.iteration


def _first_steps(attempts: Iterable[PastAttempt]) -> set[int]:
    """The first steps of the attempts, by their numbers."""
    begun = (after.iteration for attempt in attempts for after in (attempt.start, attempt.stopped) if after)
    return {1, *(iteration + 1 for iteration in begun)}


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
