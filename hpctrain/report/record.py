"""A run's events, sorted by kind, the lines about its troubles, and the figures that follow from them."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

from hpctrain.common.files.printable import shortened
from hpctrain.common.run.directory import RunDirectory
from hpctrain.common.run.events import Event, EventsFile, attempts, kept
from hpctrain.common.run.events.kinds import (
    ChangedEvent,
    DamagedEvent,
    EndEvent,
    EnergyEvent,
    EpochEvent,
    ExcludedEvent,
    FaultEvent,
    LogEvent,
    NonFiniteEvent,
    RecoveredFaultEvent,
    RunEvent,
    SlowRankEvent,
    StallEvent,
    StartEvent,
    StepEvent,
    StoppedEvent,
)
from hpctrain.common.run.value_types import ratio
from hpctrain.control.schedulers.jobs import is_job_id


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


Kind = TypeVar("Kind", bound=Event)


@dataclass(frozen=True, kw_only=True)
class PastAttempt:
    """One start of a run and its outcome: events of these kinds, None until they happen.

    ``start`` is None too for ranks that were started by hand.
    """

    start: StartEvent | None
    faults: tuple[FaultEvent, ...]
    stalls: tuple[StallEvent | SlowRankEvent, ...]
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
        gathered_bytes: the rows of whole batches that the writing rank gathered.
    """

    def __init__(self, steps: Iterable[StepEvent] = ()) -> None:
        self.count = 0
        self.seconds = 0.0
        self.samples: int | None = 0
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


class Record:
    """What one run recorded, each event once, however often the run was resumed. Unknown kinds of events are left out.

    Everything is read where it is first asked for, of what the run had recorded when the record was made. A long run
    has too many steps and logs to keep them: the newest are here, and their totals; a loop over the record reads all
    again.
    """

    def __init__(self, directory: RunDirectory) -> None:
        self._source = EventsFile(directory.events)

    @cached_property
    def events(self) -> Sequence[Event]:
        """The events in order, but for steps and logs."""
        return [event for event in kept(self._source.outline) if not isinstance(event, StepEvent)]

    @cached_property
    def attempts(self) -> list[PastAttempt]:
        """The starts of the run with their outcomes, in order."""
        return [
            PastAttempt(
                start=last_of(part, StartEvent),
                faults=tuple(of_kind(part, FaultEvent)),
                stalls=(*of_kind(part, StallEvent), *of_kind(part, SlowRankEvent)),
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
    def start(self) -> StartEvent | None:
        """The newest start of a launcher; None for ranks that were started by hand."""
        return last_of(self.events, StartEvent)

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

    @property
    def jobs(self) -> tuple[str, ...]:
        """Slurm's numbers of the jobs of all attempts."""
        named = (start.job for start in of_kind(self.events, StartEvent) if start.job)
        # What is no number names no job, but might name a file elsewhere.
        return tuple(dict.fromkeys(job for job in named if is_job_id(job)))

    @cached_property
    def last_time(self) -> float | None:
        """The time of the last event, in seconds since the epoch."""
        last = self._source.last()
        return last.time if last else None

    @cached_property
    def newest_steps(self) -> Sequence[StepEvent]:
        """The last hundred steps of the last attempt."""
        return self._source.newest(StepEvent)

    @cached_property
    def newest_logs(self) -> Sequence[LogEvent]:
        """The last hundred events of what a script logged in the last attempt."""
        return self._source.newest(LogEvent)

    @property
    def iteration(self) -> int | None:
        """The number of steps done, including earlier attempts."""
        begun = self.start.iteration if self.start else None
        iteration = self.newest_steps[-1].iteration if self.newest_steps else begun
        # A script may count its own steps, which are then in what it logs.
        logged = self.newest_logs[-1].iteration if self.newest_logs else None
        return logged or iteration or (iteration if self.run else None)

    @property
    def iterations(self) -> int | None:
        """The least number of steps in all: when ranks die, batches can become smaller and steps more."""
        if self.run is None:
            return None
        epoch = self.newest_steps[-1].epoch if self.newest_steps else self.run.epochs
        return None if epoch is None else iterations(self.run, self.iteration or 0, epoch)

    @property
    def newest_timed(self) -> Sequence[StepEvent]:
        """The newest steps that show the speed, without the first, which also compiles, traces and allocates."""
        return self.newest_steps[1:] or self.newest_steps

    @property
    def step_seconds(self) -> float | None:
        """The mean time from one step to the next, in seconds, with everything between them; None before two steps, and
        where the clock was set back meanwhile.
        """
        times = [step.time for step in self.newest_timed]
        return (times[-1] - times[0]) / (len(times) - 1) if len(times) > 1 and times[-1] >= times[0] else None

    @cached_property
    def sums(self) -> Sums:
        """The figures that follow from all steps and logs, for which the file is read once more."""
        first_steps = {1}
        for attempt in self.attempts:
            first_steps |= {event.iteration + 1 for event in (attempt.start, attempt.stopped) if event}
        energy = last_of(self.events, EnergyEvent)
        sums = Sums(first_steps, energy.iteration if energy else 0)
        for event in self:
            sums.add(event)
        return sums

    def __iter__(self) -> Iterator[Event]:
        """All events, in order, for which the file is read once more."""
        return kept(self._source)


class Sums:
    """The figures of a run that follow from its steps and logs, summed in one pass.

    Args:
        first_steps: the numbers of the steps that do not show the speed, the first of each attempt, which also compiles
            and allocates.
        energy: the number of the last step whose energy was read.

    Attributes:
        metered: the totals of the steps up to the last reading of energy.
        logged: the last value of each name that a script logged.
    """

    def __init__(self, first_steps: set[int], energy: int) -> None:
        self.totals, self.metered, self._timed = StepTotals(), StepTotals(), StepTotals()
        self.epoch_ends: dict[int, int] = {}
        self.logged: dict[str, float | None] = {}
        self._first_steps = first_steps
        self._energy = energy

    @property
    def timed(self) -> StepTotals:
        """The totals of the steps that show the speed; of all, where the run has no others."""
        return self._timed if self._timed.count else self.totals

    def is_timed(self, step: StepEvent) -> bool:
        """Whether a step is one of these."""
        return not self._timed.count or step.iteration not in self._first_steps

    def add(self, event: Event) -> None:
        """Add an event of the run."""
        if isinstance(event, StepEvent):
            self._add(event)
        elif isinstance(event, LogEvent):
            self.logged |= event.values

    def _add(self, step: StepEvent) -> None:
        self.totals.add(step)
        if step.iteration not in self._first_steps:
            self._timed.add(step)
        if step.iteration <= self._energy:
            self.metered.add(step)
        if step.epoch is not None:
            self.epoch_ends[step.epoch] = step.iteration


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
