"""Digits on 4 ranks of which some are killed: ``python benchmarks/faults.py --runs 30 --seed 0 --json faults.json``.

Each run has a seed of its own, from which its kills follow: whom, at which step and where in it, and whether another
rank is killed too, later or while the others recover. ``kill -9`` comes from outside, at any moment of a step.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import json
import math
import random
import statistics
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

from hpctrain.common.run.events import Event, read_events
from hpctrain.common.run.events.kinds import EpochEvent, FaultEvent, RecoveredFaultEvent, StepEvent

# What starts, hurts and ends runs is the fault campaign's.
sys.path.append(str(Path(__file__).parents[1] / "tests"))
from fault_campaign.faulted_run import OutOfTimeError, Place, Training

RANKS, EPOCHS, STEPS_AN_EPOCH, SAMPLES = 4, 8, 23, 1437
KINDS = ("one", "one", "two", "in recovery")
_LIMIT_SECONDS = 300.0


@dataclass(frozen=True, kw_only=True)
class Kill:
    """``kill -9`` of a rank ``delay`` seconds after the event of a step, or ``delay`` after the kill before."""

    rank: int
    step: int
    delay: float


@dataclass(frozen=True, kw_only=True)
class Result:
    """What became of one run.

    Attributes:
        seconds: from each kill to the next finished step; ``recovery_seconds`` is the part after its discovery.
        epochs_not_whole: epochs whose steps together did not have each sample once.
    """

    seed: int
    kind: str
    kills: tuple[Kill, ...]
    completed: bool
    lost_steps: int
    samples_affected: int
    epochs_not_whole: int
    seconds: tuple[float, ...]
    recovery_seconds: tuple[float, ...]
    accuracy: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0, help="of the first run; each has the next")
    parser.add_argument("--json", type=Path, help="where all numbers go")
    options = parser.parse_args()
    results = []
    print(
        f"{'seed':>4}  {'kind':11} {'rank@step':>13}  {'done':4} {'lost':>4} {'affected':>8}  {'seconds':>11}  accuracy"
    )
    for seed in range(options.seed, options.seed + options.runs):
        with tempfile.TemporaryDirectory() as folder:
            results.append(run(seed, Path(folder) / "case"))
        print(line(results[-1]), flush=True)
    print(total(results))
    if options.json:
        options.json.write_text(json.dumps([asdict(result) for result in results], indent=2) + "\n")


def kills_of(seed: int) -> tuple[str, tuple[Kill, ...]]:
    """The kills of a run, in the order of time."""
    draw = random.Random(seed)
    kind = KINDS[seed % len(KINDS)]
    last = EPOCHS * STEPS_AN_EPOCH - 10
    first, second = draw.sample(range(RANKS), 2)
    steps = sorted(draw.sample(range(3, last), 2))
    kills = [Kill(rank=first, step=steps[0], delay=draw.uniform(0, 0.03))]
    if kind == "two":
        kills.append(Kill(rank=second, step=steps[1], delay=draw.uniform(0, 0.03)))
    if kind == "in recovery":
        kills.append(Kill(rank=second, step=0, delay=draw.uniform(0.002, 0.04)))
    return kind, tuple(kills)


def run(seed: int, folder: Path) -> Result:
    """One run; ends every process that it started."""
    kind, kills = kills_of(seed)
    settings = [word for each in ("fault_tolerance.lost_rank=shrink", f"epochs={EPOCHS}") for word in ("--set", each)]
    folder.mkdir()
    place = Place(folder=folder, limit=_LIMIT_SECONDS)
    times: list[float] = []
    try:
        training = place.begin("digits", "-np", str(RANKS), "--oversubscribe", "--backend", "mpi", *settings)
        # A run that ends too soon is judged by what it has done.
        with contextlib.suppress(OutOfTimeError):
            times = carry_out(kills, training)
        ended = training.end()
        events = list(read_events(place.directory.events))
    finally:
        place.close()
    result = judge(seed, kind, kills, times, events, completed=ended.code == 0)
    if not result.completed:
        print(ended.printed, file=sys.stderr)
    return result


def carry_out(kills: tuple[Kill, ...], training: Training) -> list[float]:
    """Kill as planned; returns when."""
    times: list[float] = []
    for kill in kills:
        training.wait_for_step(kill.step)
        ranks = training.ranks()
        time.sleep(kill.delay)
        # A rank that is done meanwhile cannot be killed any more: the run then lacks a fault and does not count.
        with contextlib.suppress(KeyError, psutil.NoSuchProcess):
            ranks[kill.rank].kill()
            times.append(time.time())
    return times


def judge(
    seed: int, kind: str, kills: tuple[Kill, ...], times: list[float], events: list[Event], *, completed: bool
) -> Result:
    done = [event for event in events if isinstance(event, StepEvent)]
    faults = [event for event in events if isinstance(event, FaultEvent)]
    epochs = [event for event in events if isinstance(event, EpochEvent)]
    recoveries = [fault for fault in faults if isinstance(fault, RecoveredFaultEvent)]
    numbers = [event.iteration for event in done]
    whole = EPOCHS * STEPS_AN_EPOCH
    # Not the first step after the kill, which may have needed the dead rank no more: the first after its fault.
    recovered = {event.rank: event.time for event in faults}
    ends = [(at, recovered.get(kill.rank, math.inf)) for at, kill in zip(times, kills, strict=False)]
    after = [[event.time - at for event in done if event.time >= recovered] for at, recovered in ends]
    seen = collections.Counter[int | None]()
    for event in done:
        seen[event.epoch] += event.samples or 0
    accuracy = epochs[-1].test_accuracy if epochs else 0.0
    assert accuracy is not None
    affected = sum(fault.samples_affected for fault in recoveries)
    return Result(
        seed=seed,
        kind=kind,
        kills=kills,
        completed=completed and len(faults) == len(kills) and numbers == list(range(1, whole + 1)),
        lost_steps=whole - len(set(numbers)) + len(numbers) - len(set(numbers)),
        samples_affected=affected,
        epochs_not_whole=sum(seen[epoch] != SAMPLES for epoch in range(1, EPOCHS + 1)),
        seconds=tuple(later[0] for later in after if later),
        recovery_seconds=tuple(fault.recovery_seconds for fault in recoveries),
        accuracy=accuracy,
    )


def line(result: Result) -> str:
    where = ", ".join(f"{kill.rank}@{kill.step or '+'}" for kill in result.kills)
    seconds = ", ".join(f"{each:.2f}" for each in result.seconds)
    return (
        f"{result.seed:4}  {result.kind:11} {where:>13}  {'yes' if result.completed else 'NO':4} "
        f"{result.lost_steps:4} {result.samples_affected:8}  {seconds:>11}  {result.accuracy:.4f}"
    )


def total(results: list[Result]) -> str:
    seconds: list[Any] = [each for result in results for each in result.seconds]
    completed = sum(result.completed for result in results)
    times = f"median {statistics.median(seconds):.2f} s, max {max(seconds):.2f} s" if seconds else "never"
    return (
        f"{completed} of {len(results)} completed; {sum(result.lost_steps for result in results)} steps lost or done "
        f"twice, {sum(result.epochs_not_whole for result in results)} epochs without each sample once, "
        f"{sum(result.samples_affected for result in results)} samples affected; from a kill to the next "
        f"finished step: {times}; accuracy at least {min(result.accuracy for result in results):.4f}"
    )


if __name__ == "__main__":
    main()
