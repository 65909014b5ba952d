"""How far a run is, read quickly from a file of events that may be long."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice

from hpctrain.errors import HpctrainError
from hpctrain.events import Event, parse_event
from hpctrain.report.record import past_attempts, survived
from hpctrain.rundir import RunDirectory

# Steps over which speed is taken: enough to be calm, few enough to follow a change.
_WINDOW = 100
# Where the kind stands, after the time, in a line that EventWriter wrote.
_STEP, _LOG = b'"event": "step"', b'"event": "log"'
_WITHIN = 64


@dataclass(frozen=True, kw_only=True)
class Progress:
    """The last events of a run, without what its last start took back.

    Attributes:
        start, run, epoch: the last events of these kinds; empty where there is none.
        fault, stopped: those that ended the last attempt.
        survived: the faults of all attempts that the run got over by itself.
        damaged: the events of this kind of all attempts.
        stalls: of the last attempt.
        steps, logs: the last ones of the last attempt.
        last_time: when anything happened last, in seconds since the epoch.
        jobs: Slurm's numbers of the jobs of all attempts.
    """

    start: Event
    run: Event
    epoch: Event
    fault: Event
    stopped: Event
    survived: Sequence[Event]
    damaged: Sequence[Event]
    stalls: Sequence[Event]
    steps: Sequence[Event]
    logs: Sequence[Event]
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
        numbers = [number for number, line in enumerate(lines) if not (_is(_STEP, line) or _is(_LOG, line))]
        others = [parse_event(lines[number], where) for number in numbers]
        starts = (number for number, event in zip(numbers, others, strict=True) if event["event"] == "start")
        begin = max(starts, default=0)
        steps, logs = (_newest(lines[begin:], mark, where) for mark in (_STEP, _LOG))
        last = {event["event"]: event for event in others}
        attempts = past_attempts(others)
        return cls(
            start=last.get("start", {}),
            run=last.get("run", {}),
            epoch=_last_epoch(lines, zip(numbers, others, strict=True), where),
            fault=attempts[-1].fatal[-1] if attempts and attempts[-1].fatal else {},
            stopped=attempts[-1].stopped if attempts else {},
            survived=survived(attempts),
            damaged=[event for event in others if event["event"] == "damaged"],
            stalls=attempts[-1].stalls if attempts else (),
            steps=steps,
            logs=logs,
            last_time=parse_event(lines[-1], where)["time"] if lines else None,
            jobs=tuple(dict.fromkeys(str(event["job"]) for event in others if event.get("job"))),
        )

    @property
    def iteration(self) -> int | None:
        """How many steps are done, those before this attempt with them."""
        iteration: int | None = self.steps[-1]["iteration"] if self.steps else self.start.get("iteration")
        # A script can count by itself, and says nothing of its steps until it does.
        own = self.logs[-1]["iteration"] if self.logs else None
        return own or iteration or (iteration if self.run else None)

    @property
    def logged(self) -> dict[str, float | None]:
        """The newest values that a script logged, by name."""
        return {name: value for event in self.logs for name, value in event["values"].items()}

    @property
    def iterations(self) -> int | None:
        """How many there are in all, or at least; ranks that died can have made batches smaller, and steps more."""
        if self.run.get("epochs") is None or self.run["iterations_per_epoch"] is None:
            return None
        epoch = self.steps[-1]["epoch"] if self.steps else self.run["epochs"]
        return None if epoch is None else iterations(self.run, self.iteration or 0, epoch)

    @property
    def timed_steps(self) -> Sequence[Event]:
        """The steps that tell the speed: the first one also compiles, traces and allocates."""
        return self.steps[1:] or self.steps

    @property
    def step_seconds(self) -> float | None:
        """From one step to the next, with all that is between them; None before there are two steps to tell it."""
        times = [step["time"] for step in self.timed_steps]
        return (times[-1] - times[0]) / (len(times) - 1) if len(times) > 1 else None


def iterations(run: Event, iteration: int, epoch: int) -> int:
    """How many steps a run has at least of which one is known, and its epoch; as a rule it is exactly so many."""
    per_epoch, epochs = int(run["iterations_per_epoch"]), int(run["epochs"])
    return max(epochs * per_epoch, iteration + (epochs - epoch) * per_epoch)


def _last_epoch(lines: Sequence[bytes], others: Iterable[tuple[int, Event]], where: str) -> Event:
    """The last epoch that was not lost at a start from a checkpoint, which is of the moment before its evaluation.

    Args:
        lines: of the file.
        others: events that are no steps, each with the number of its line.
        where: the file.
    """
    epochs: dict[int, tuple[int, Event]] = {}
    begin, done = -1, 0
    for number, event in others:
        match event["event"]:
            case "start":
                begin, done = number, event["iteration"]
                epochs = {epoch: ended for epoch, ended in epochs.items() if ended[0] < done}
            case "epoch":
                steps = (lines[before] for before in range(number - 1, begin, -1) if _is(_STEP, lines[before]))
                last = next(steps, None)
                epochs[event["epoch"]] = (_parse(last, "step", where)["iteration"] if last else done, event)
    return epochs[max(epochs)][1] if epochs else {}


def _newest(lines: Sequence[bytes], mark: bytes, where: str) -> list[Event]:
    """The last events of a frequent kind."""
    kind = mark.decode().split('"')[-2]
    newest = islice((line for line in reversed(lines) if _is(mark, line)), _WINDOW)
    return [_parse(line, kind, where) for line in newest][::-1]


def _parse(line: bytes, kind: str, where: str) -> Event:
    event = parse_event(line, where)
    # A key that is there twice has its last value.
    if event["event"] != kind:
        raise HpctrainError(f"{where}: not an event: a {kind} that is called {event['event']!r} too")
    return event


def _is(mark: bytes, line: bytes) -> bool:
    return line.find(mark, 0, _WITHIN) >= 0
