"""The progress of a run, read quickly from an events file that may be long."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TypeVar

from hpctrain.errors import HpctrainError
from hpctrain.report.record import last_of, of_kind, past_attempts, survived
from hpctrain.run.directory import RunDirectory
from hpctrain.run.events import Event, parse_event
from hpctrain.run.events.kinds import (
    DamagedEvent,
    EpochEvent,
    FaultEvent,
    LogEvent,
    RunEvent,
    StallEvent,
    StartEvent,
    StepEvent,
    StoppedEvent,
)
from hpctrain.run.events.lines import mark
from hpctrain.run.events.reader import whole

# Steps over which speed is taken: enough to be calm, few enough to follow a change.
_WINDOW = 100
# Where the kind stands, after the time, in a line that EventWriter wrote.
_WITHIN = 64
_MARKS = {StepEvent: mark(StepEvent), LogEvent: mark(LogEvent)}
Frequent = TypeVar("Frequent", StepEvent, LogEvent)


@dataclass(frozen=True, kw_only=True)
class Progress:
    """The last events of a run, without those that its last start discarded.

    Attributes:
        start, run, epoch: the last events of these kinds; None where there is none.
        fault, stopped: those that ended the last attempt; None where there is none.
        survived: the faults of all attempts that the run got over by itself.
        damaged: the events of this kind of all attempts.
        stalls: of the last attempt.
        others: all events but steps and logs, lost ones too.
        steps, logs: the last ones of the last attempt.
        last_time: when anything happened last, in seconds since the epoch.
        jobs: Slurm's numbers of the jobs of all attempts.
    """

    start: StartEvent | None
    run: RunEvent | None
    epoch: EpochEvent | None
    fault: FaultEvent | None
    stopped: StoppedEvent | None
    survived: Sequence[FaultEvent]
    damaged: Sequence[DamagedEvent]
    stalls: Sequence[StallEvent]
    others: Sequence[Event]
    steps: Sequence[StepEvent]
    logs: Sequence[LogEvent]
    last_time: float | None
    jobs: tuple[str, ...]

    @classmethod
    def read(cls, directory: RunDirectory) -> Progress:
        """Read the progress of a run that may still be going on; only the last steps are parsed.

        Raises:
            HpctrainError: a line that is looked into is no event.
        """
        text = directory.events.read_bytes() if directory.events.exists() else b""
        lines = text[: whole(text)].splitlines()
        where = str(directory.events)
        numbers = [number for number, line in enumerate(lines) if not (_is(StepEvent, line) or _is(LogEvent, line))]
        others = [_parse(lines, number, where) for number in numbers]
        starts = (number for number, event in zip(numbers, others, strict=True) if isinstance(event, StartEvent))
        begin = max(starts, default=0)
        attempts = past_attempts(others)
        return cls(
            start=last_of(others, StartEvent),
            run=last_of(others, RunEvent),
            epoch=_last_epoch(lines, zip(numbers, others, strict=True), where),
            fault=attempts[-1].fatal[-1] if attempts and attempts[-1].fatal else None,
            stopped=attempts[-1].stopped if attempts else None,
            survived=survived(attempts),
            damaged=of_kind(others, DamagedEvent),
            stalls=attempts[-1].stalls if attempts else (),
            others=others,
            steps=_newest(lines, begin, StepEvent, where),
            logs=_newest(lines, begin, LogEvent, where),
            last_time=_parse(lines, len(lines) - 1, where).time if lines else None,
            jobs=tuple(dict.fromkeys(start.job for start in of_kind(others, StartEvent) if start.job)),
        )

    @property
    def iteration(self) -> int | None:
        """The number of steps done, including earlier attempts."""
        begun = self.start.iteration if self.start else None
        iteration = self.steps[-1].iteration if self.steps else begun
        # A script can count by itself, and says nothing of its steps until it does.
        own = self.logs[-1].iteration if self.logs else None
        return own or iteration or (iteration if self.run else None)

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
        """The mean time from one step to the next, with everything between them; None before two steps."""
        times = [step.time for step in self.timed_steps]
        return (times[-1] - times[0]) / (len(times) - 1) if len(times) > 1 else None


def iterations(run: RunEvent, iteration: int, epoch: int) -> int | None:
    """The least number of steps of a run for a known step and its epoch; usually the exact number.

    None for a script's, of which nobody knows.
    """
    per_epoch, epochs = run.iterations_per_epoch, run.epochs
    if per_epoch is None or epochs is None:
        return None
    return max(epochs * per_epoch, iteration + (epochs - epoch) * per_epoch)


def _last_epoch(lines: Sequence[bytes], others: Iterable[tuple[int, Event]], where: str) -> EpochEvent | None:
    """The last epoch that was not lost at a start from a checkpoint, which is of the moment before its evaluation.

    Args:
        lines: of the file.
        others: events that are no steps, each with the number of its line.
        where: the file.
    """
    epochs: dict[int, tuple[int, EpochEvent]] = {}
    begin, done = -1, 0
    for number, event in others:
        match event:
            case StartEvent():
                begin, done = number, event.iteration
                epochs = {epoch: known for epoch, known in epochs.items() if known[0] < done}
            case EpochEvent():
                steps = (before for before in range(number - 1, begin, -1) if _is(StepEvent, lines[before]))
                last = next(steps, None)
                ended = done if last is None else _of_kind(lines, last, StepEvent, where).iteration
                epochs[event.epoch] = (ended, event)
    return epochs[max(epochs)][1] if epochs else None


def _newest(lines: Sequence[bytes], begin: int, kind: type[Frequent], where: str) -> list[Frequent]:
    """The last events of a frequent kind, from the line of that number on."""
    numbers = (number for number in range(len(lines) - 1, begin - 1, -1) if _is(kind, lines[number]))
    return [_of_kind(lines, number, kind, where) for number in islice(numbers, _WINDOW)][::-1]


def _of_kind(lines: Sequence[bytes], number: int, kind: type[Frequent], where: str) -> Frequent:
    event = _parse(lines, number, where)
    # A key that is there twice has its last value.
    if not isinstance(event, kind):
        said = _MARKS[kind].decode()
        raise HpctrainError(f"{where}:{number + 1}: not an event: it has {said}, and is {event.event!r} too")
    return event


def _parse(lines: Sequence[bytes], number: int, where: str) -> Event:
    return parse_event(lines[number], f"{where}:{number + 1}")


def _is(kind: type[StepEvent | LogEvent], line: bytes) -> bool:
    return line.find(_MARKS[kind], 0, _WITHIN) >= 0
