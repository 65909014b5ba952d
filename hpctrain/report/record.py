"""A run's events, sorted by kind, and the figures that follow from them: all of them, or quickly the newest."""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

from hpctrain.common.errors import HpctrainError
from hpctrain.common.run.directory import RunDirectory
from hpctrain.common.run.events import Event, EventsFile, attempts, kept
from hpctrain.common.run.events.kinds import (
    DamagedEvent,
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
from hpctrain.common.run.events.reader import BOUNDS, Events
from hpctrain.common.run.values import ratio
from hpctrain.control.schedulers.slurm.queue import is_job_id

Kind = TypeVar("Kind", bound=Event)

# What a status shows; other kinds are not parsed for it.
_OF_PROGRESS = (
    *BOUNDS,
    EpochEvent,
    FaultEvent,
    DamagedEvent,
    StallEvent,
    EnergyEvent,
    EndEvent,
)


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
    """The totals of some steps.

    Attributes:
        samples: the samples of all ranks; None for a script, whose samples are not known.
        communication_bytes: what the writing rank gave to reductions, before compression; None if not counted.
        gathered_bytes: the rows of whole batches that the writing rank gathered.
    """

    def __init__(self, steps: Iterable[StepEvent] = ()) -> None:
        self.count = 0
        self.seconds = 0.0
        self.samples: int | None = 0
        self.communication_bytes: int | None = 0
        self.gathered_bytes = 0
        # Seconds in communication, waiting for data, and in the whole of the steps for which these were measured.
        self._communication = self._communication_of = 0.0
        self._data = self._data_of = 0.0
        for step in steps:
            self.add(step)

    def add(self, step: StepEvent) -> None:
        """Add a step."""
        self.count += 1
        self.seconds += step.seconds
        self.samples = None if self.samples is None or step.samples is None else self.samples + step.samples
        given, each = self.communication_bytes, step.communication_bytes
        self.communication_bytes = None if given is None or each is None else given + each
        self.gathered_bytes += step.gathered_bytes or 0
        if step.communication_seconds is not None:
            self._communication += step.communication_seconds
            self._communication_of += step.seconds
        if step.data_seconds is not None:
            self._data += step.data_seconds
            self._data_of += step.seconds

    @property
    def samples_per_s(self) -> float | None:
        """The throughput over all ranks; None for a script, whose samples are not known."""
        return ratio(self.samples, self.seconds)

    @property
    def communication_share(self) -> float | None:
        """The share of communication in the steps' time, 0 to 1; None if it was not measured."""
        return ratio(self._communication, self._communication_of)

    @property
    def data_share(self) -> float | None:
        """The share of waiting for samples in the steps' time, 0 to 1; None if it was not measured."""
        return ratio(self._data, self._data_of)


@dataclass(frozen=True, kw_only=True)
class Outline:
    """A run's events in order, without steps and logs, and without what was lost and done again."""

    events: Sequence[Event]

    @cached_property
    def attempts(self) -> list[PastAttempt]:
        """The starts of the run with their outcomes, in order."""
        return [
            PastAttempt(
                start=last_of(part, StartEvent),
                faults=tuple(of_kind(part, FaultEvent)),
                stalls=tuple(of_kind(part, StallEvent)),
                stopped=last_of(part, StoppedEvent),
                end=last_of(part, EndEvent),
            )
            for part in attempts(self.events)
        ]

    @property
    def last_attempt(self) -> PastAttempt | None:
        """The newest attempt; None before the first."""
        return self.attempts[-1] if self.attempts else None

    @cached_property
    def run(self) -> RunEvent | None:
        """The newest event of its kind, None until it happened."""
        return last_of(self.events, RunEvent)

    @cached_property
    def epochs(self) -> list[EpochEvent]:
        """The events of the epochs, in order."""
        return of_kind(self.events, EpochEvent)

    @property
    def faults(self) -> tuple[FaultEvent, ...]:
        """The faults that ended the last attempt."""
        return self.last_attempt.fatal if self.last_attempt else ()

    @property
    def survived(self) -> list[tuple[int, FaultEvent]]:
        """The faults that the run recovered from by itself, each with its attempt's number, from 1.

        Those are lost ranks without which the others went on, and faults that ended an attempt but not the run, because
        the launcher began the next one.
        """
        return [
            (number, fault)
            for number, (attempt, further) in enumerate(
                itertools.zip_longest(self.attempts, self.attempts[1:]), start=1
            )
            for fault in attempt.faults
            if isinstance(fault, RecoveredFaultEvent) or (further and not attempt.end)
        ]

    @property
    def end(self) -> EndEvent | None:
        """The end of the last attempt; None until then."""
        return self.last_attempt.end if self.last_attempt else None


@dataclass(frozen=True, kw_only=True)
class Record(Outline):
    """Everything that one run recorded, each step and epoch once, however often the run was resumed.

    A long run has too many steps and logs to keep them: their totals are here, and :meth:`steps` and :meth:`logs` read
    them again.

    Attributes:
        last_time: the time of the last event, in seconds since the epoch.
        timed: the totals of the steps that show the speed, without the first of each attempt, which also compiles and
            allocates.
        durations: the seconds of each timed step.
        metered: the totals of the steps up to the last reading of energy.
        epoch_ends: the last step of each epoch.
        by_epoch: whether each step's epoch is known: true for a recipe, false for a script.
        first_steps: the numbers of the steps that are not timed.
        logged: the last value of each name that a script logged.
        logged_counts: how often each name was logged.
        source: the run's events, to be read again.
    """

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
        outline = _outline(source.outline() if isinstance(source, EventsFile) else source)
        run, last_energy = outline.run, last_of(outline.events, EnergyEvent)
        first = _first_steps(outline.attempts)
        sums = _Sums(first, last_energy.iteration if last_energy else 0)
        for event in kept(source):
            sums.add(event)
        if sums.totals.count and run is None:
            raise HpctrainError(
                "HT-run-no-start-event", "{where}: there are steps, but no event 'run' that says of what", where=where
            )
        counts = (run.epochs, run.iterations_per_epoch) if run else (None,)
        return cls(
            events=outline.events,
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
    def overlaps(self) -> list[OverlapEvent]:
        """The events of this kind, in order."""
        return of_kind(self.events, OverlapEvent)


@dataclass(frozen=True, kw_only=True)
class Progress(Outline):
    """The progress of a run, read quickly from a file that may be long: of steps and logs only the last are parsed.

    Attributes:
        steps, logs: the last hundred of the last attempt, at most.
        last_time: the time of the last event, in seconds since the epoch.
    """

    steps: Sequence[StepEvent]
    logs: Sequence[LogEvent]
    last_time: float | None

    @classmethod
    def read(cls, directory: RunDirectory) -> Progress:
        """Read the progress of a run that may still be going on.

        Raises:
            HpctrainError: the file cannot be read, or a line that is parsed is no event.
        """
        source = EventsFile(directory.events)
        last = source.last()
        return cls(
            events=_outline(source.outline(*_OF_PROGRESS)).events,
            steps=source.newest(StepEvent),
            logs=source.newest(LogEvent),
            last_time=last.time if last else None,
        )

    @property
    def start(self) -> StartEvent | None:
        """The newest start of the launcher; None for ranks that were started by hand."""
        return last_of(self.events, StartEvent)

    @property
    def jobs(self) -> tuple[str, ...]:
        """Slurm's numbers of the jobs of all attempts."""
        named = (start.job for start in of_kind(self.events, StartEvent) if start.job)
        # What is no number names no job, but might name a file elsewhere.
        return tuple(dict.fromkeys(job for job in named if is_job_id(job)))

    @property
    def iteration(self) -> int | None:
        """The number of steps done, including earlier attempts."""
        begun = self.start.iteration if self.start else None
        iteration = self.steps[-1].iteration if self.steps else begun
        # A script may count its own steps, which are then in what it logs.
        logged = self.logs[-1].iteration if self.logs else None
        return logged or iteration or (iteration if self.run else None)

    @property
    def logged(self) -> dict[str, float | None]:
        """The newest values that a script logged, by name."""
        return {name: value for event in self.logs for name, value in event.values.items()}

    @property
    def iterations(self) -> int | None:
        """The least number of steps in all: when ranks die, batches can become smaller and steps more."""
        if self.run is None:
            return None
        epoch = self.steps[-1].epoch if self.steps else self.run.epochs
        return None if epoch is None else iterations(self.run, self.iteration or 0, epoch)

    @property
    def timed_steps(self) -> Sequence[StepEvent]:
        """The steps that show the speed, without the first, which also compiles, traces and allocates."""
        return self.steps[1:] or self.steps

    @property
    def step_seconds(self) -> float | None:
        """The mean time from one step to the next, in seconds, with everything between them; None before two steps, and
        where the clock was set back meanwhile.
        """
        times = [step.time for step in self.timed_steps]
        return (times[-1] - times[0]) / (len(times) - 1) if len(times) > 1 and times[-1] >= times[0] else None


def _outline(events: Iterable[Event]) -> Outline:
    return Outline(events=[event for event in kept(events) if not isinstance(event, StepEvent | LogEvent)])


class _Sums:
    """The figures of a record that follow from steps and logs, summed in one pass.

    Args:
        first: the numbers of the steps that are not timed.
        energy: the number of the last step whose energy was read.
    """

    def __init__(self, first: set[int], energy: int) -> None:
        self.totals, self.timed, self.metered = StepTotals(), StepTotals(), StepTotals()
        # The median needs every duration. Nothing else in a record grows with the steps; these take 8 bytes each.
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
    """The numbers of the attempts' first steps."""
    begun = (after.iteration for attempt in attempts for after in (attempt.start, attempt.stopped) if after)
    return {1, *(iteration + 1 for iteration in begun)}


def iterations(run: RunEvent, iteration: int, epoch: int) -> int | None:
    """The least number of steps of a run for a known step and its epoch; usually the exact number.

    None for a script, whose number of steps is not known.
    """
    per_epoch, epochs = run.iterations_per_epoch, run.epochs
    if per_epoch is None or epochs is None:
        return None
    return max(epochs * per_epoch, iteration + (epochs - epoch) * per_epoch)


def of_kind(events: Iterable[Event], kind: type[Kind]) -> list[Kind]:
    """The events of a kind, in order."""
    return [event for event in events if isinstance(event, kind)]


def last_of(events: Sequence[Event], kind: type[Kind]) -> Kind | None:
    """The last event of a kind; None without one."""
    return next((event for event in reversed(events) if isinstance(event, kind)), None)
