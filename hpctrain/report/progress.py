"""The progress of a run, read quickly from an events file that may be long."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hpctrain.common.run.directory import RunDirectory
from hpctrain.common.run.events import Event, EventsFile, kept
from hpctrain.common.run.events.kinds import (
    DamagedEvent,
    EndEvent,
    EnergyEvent,
    EpochEvent,
    FaultEvent,
    LogEvent,
    RunEvent,
    StallEvent,
    StartEvent,
    StepEvent,
    StoppedEvent,
)
from hpctrain.report.record import last_of, of_kind, past_attempts, survived

_SHOWN = (
    StartEvent,
    RunEvent,
    EpochEvent,
    FaultEvent,
    StoppedEvent,
    DamagedEvent,
    StallEvent,
    EnergyEvent,
    EndEvent,
)


@dataclass(frozen=True, kw_only=True)
class Progress:
    """The last events of a run, without those that its last start discarded.

    Attributes:
        start, run, epoch: the last events of these kinds; None where there is none.
        fault, stopped: those that ended the last attempt; None where there is none.
        survived: the faults of all attempts that the run got over by itself.
        damaged: the events of this kind of all attempts.
        stalls: of the last attempt.
        others: the events of all these kinds and of energy, lost ones too.
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
        """Read the progress of a run that may still be going on; of steps and logs only the last are parsed.

        Raises:
            HpctrainError: the file cannot be read, or a line that is looked into is no event.
        """
        events = EventsFile(directory.events)
        outline, last = [*events.outline(*_SHOWN)], events.last()
        attempts = past_attempts(outline)
        epochs = of_kind(kept(outline), EpochEvent)
        return cls(
            start=last_of(outline, StartEvent),
            run=last_of(outline, RunEvent),
            epoch=epochs[-1] if epochs else None,
            fault=attempts[-1].fatal[-1] if attempts and attempts[-1].fatal else None,
            stopped=attempts[-1].stopped if attempts else None,
            survived=survived(attempts),
            damaged=of_kind(outline, DamagedEvent),
            stalls=attempts[-1].stalls if attempts else (),
            others=outline,
            steps=events.newest(StepEvent),
            logs=events.newest(LogEvent),
            last_time=last.time if last else None,
            jobs=tuple(dict.fromkeys(start.job for start in of_kind(outline, StartEvent) if start.job)),
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
