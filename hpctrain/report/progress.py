"""How far a run is, read quickly from a file of events that may be long."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

from hpctrain.events import Event, parse_event
from hpctrain.report.record import past_attempts, survived
from hpctrain.rundir import RunDirectory

# Steps over which speed is taken: enough to be calm, few enough to follow a change.
_WINDOW = 100
# Where the kind stands, behind the time, in a step that EventWriter wrote.
_STEP = b'"event": "step"'
_STEP_WITHIN = 64


@dataclass(frozen=True, kw_only=True)
class Progress:
    """The last events of a run, without what its last start took back.

    Attributes:
        start, run, epoch: the last events of these kinds; empty where there is none.
        fault, stopped: those that ended the last attempt.
        survived: the faults of all attempts that the run got over by itself.
        stalls: of the last attempt.
        steps: the last ones of the last attempt.
        last_time: when anything happened last, in seconds since the epoch.
        jobs: Slurm's numbers of the jobs of all attempts.
    """

    start: Event
    run: Event
    epoch: Event
    fault: Event
    stopped: Event
    survived: Sequence[Event]
    stalls: Sequence[Event]
    steps: Sequence[Event]
    last_time: float | None
    jobs: tuple[str, ...]

    @classmethod
    def read(cls, directory: RunDirectory) -> Progress:
        """The progress of a run that may still be going on; of its steps only the last ones are parsed.

        Raises:
            HpctrainError: a line that is looked into is no event.
        """
        lines = directory.events.read_bytes().splitlines(keepends=True) if directory.events.exists() else []
        # A crash can cut the last one short.
        if lines and not lines[-1].endswith(b"\n"):
            lines.pop()
        where = str(directory.events)
        numbers = [number for number, line in enumerate(lines) if line.find(_STEP, 0, _STEP_WITHIN) < 0]
        others = [parse_event(lines[number], where) for number in numbers]
        starts = (number for number, event in zip(numbers, others, strict=True) if event["event"] == "start")
        begin = max(starts, default=0)
        newest = islice((line for line in reversed(lines[begin:]) if line.find(_STEP, 0, _STEP_WITHIN) >= 0), _WINDOW)
        steps = [parse_event(line, where) for line in newest][::-1]
        last = {event["event"]: event for event in others}
        attempts = past_attempts(others)
        return cls(
            start=last.get("start", {}),
            run=last.get("run", {}),
            epoch=_last_epoch(others),
            fault=attempts[-1].fatal[-1] if attempts and attempts[-1].fatal else {},
            stopped=attempts[-1].stopped if attempts else {},
            survived=survived(attempts),
            stalls=attempts[-1].stalls if attempts else (),
            steps=steps,
            last_time=parse_event(lines[-1], where)["time"] if lines else None,
            jobs=tuple(dict.fromkeys(str(event["job"]) for event in others if event.get("job"))),
        )

    @property
    def iteration(self) -> int | None:
        """How many steps are done, those before this attempt with them."""
        iteration: int | None = self.steps[-1]["iteration"] if self.steps else self.start.get("iteration")
        return iteration

    @property
    def iterations(self) -> int | None:
        """How many there are in all."""
        return self.run["epochs"] * self.run["iterations_per_epoch"] if self.run else None

    @property
    def timed_steps(self) -> Sequence[Event]:
        """The steps that tell the speed: the first one also compiles, traces and allocates."""
        return self.steps[1:] or self.steps

    @property
    def step_seconds(self) -> float | None:
        """From one step to the next, with all that is between them; None before there are two steps to tell it."""
        times = [step["time"] for step in self.timed_steps]
        return (times[-1] - times[0]) / (len(times) - 1) if len(times) > 1 else None


def _last_epoch(events: Sequence[Event]) -> Event:
    """The last epoch that was not lost at a start from a checkpoint, which is of the moment before its evaluation."""
    epochs: dict[int, Event] = {}
    steps = 1
    for event in events:
        match event["event"]:
            case "run":
                steps = event["iterations_per_epoch"]
            case "start":
                epochs = {epoch: ended for epoch, ended in epochs.items() if epoch * steps < event["iteration"]}
            case "epoch":
                epochs[event["epoch"]] = event
    return epochs[max(epochs)] if epochs else {}
