"""What the commands cost that read the events of a long run: ``python benchmarks/long_runs.py --events 1000000``.

A real run of the ``digits`` recipe on two ranks is lengthened: its lines are repeated with the numbers, times, losses
and durations of a run of so many steps (``--seed``). Prints seconds and the peak of the resident memory by command.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_STEPS_AN_EPOCH = 1000
_STEPS_A_READING = 300
_PROGRAM = [sys.executable, "-c", "from hpctrain.cli.main import main; main()"]
# What `hpctrain run --resume` and rank 0 of it read before the first step.
_RESUME = """
import sys
from pathlib import Path
from hpctrain.common.checkpoints.find import scores
from hpctrain.control.resuming.attempts import run_events
from hpctrain.common.run.directory import RunDirectory
from hpctrain.common.run.events import EventsFile, kept
from hpctrain.common.run.events.kinds import StartEvent
directory = RunDirectory(Path(sys.argv[1]))
run_events(directory)
scores(kept(EventsFile(directory.events).outline))
EventsFile(directory.events).few(StartEvent)
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--events", type=int, default=1_000_000, help="steps of the lengthened run")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", type=Path, help="write the run here, and leave it")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        run = options.keep or Path(folder) / "run"
        if not run.exists():
            write_run(run, options.events, options.seed)
        events = run / "events.jsonl"
        print(f"{options.events:,} steps, {events.stat().st_size / 1e6:.0f} MB of events")
        print(f"{'command':24} {'s':>7} {'CPU s':>7} {'MB':>6}")
        commands = {
            "status": [*_PROGRAM, "status", str(run)],
            "checkpoint list": [*_PROGRAM, "checkpoint", "list", str(run)],
            "report": [*_PROGRAM, "report", str(run)],
            "report --json": [*_PROGRAM, "report", str(run), "--json"],
            "resume: its reading": [sys.executable, "-c", _RESUME, str(run)],
            "tensorboard": [*_PROGRAM, "report", str(run), "--tracking", "tensorboard"],
        }
        for name, command in commands.items():
            seconds, processor, megabytes = measure(command)
            print(f"{name:24} {seconds:7.2f} {processor:7.2f} {megabytes:6.0f}", flush=True)


def measure(command: list[str]) -> tuple[float, float, float]:
    """Seconds, the processor's seconds, and the peak of the resident memory in MB, of a command that succeeds."""
    begin = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"{' '.join(command)}: exit status {process.returncode}")
    return time.perf_counter() - begin, used.ru_utime + used.ru_stime, used.ru_maxrss / 1024


def write_run(run: Path, steps: int, seed: int) -> None:
    """A run directory with so many steps, and all else as the real run left it but its summary."""
    with tempfile.TemporaryDirectory() as folder:
        real = Path(folder) / "run"
        options = ["-np", "2", "--backend", "mpi", "--set", "epochs=2", "--run-dir", str(real)]
        subprocess.run([*_PROGRAM, "run", "digits", *options], check=True, capture_output=True)
        (real / "summary.json").unlink()
        shutil.copytree(real, run)
    lines = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    with (run / "events.jsonl").open("w") as file:
        file.writelines(json.dumps(event) + "\n" for event in lengthened(lines, steps, random.Random(seed)))


def lengthened(lines: list[dict[str, Any]], steps: int, chance: random.Random) -> Iterator[dict[str, Any]]:
    """The events of a run of so many steps, in epochs of a thousand."""
    kinds: dict[str, list[dict[str, Any]]] = {}
    for line in lines:
        kinds.setdefault(line["event"], []).append(line)
    now = kinds["run"][0]["time"]
    yield kinds["start"][0]
    yield {**kinds["run"][0], "epochs": -(-steps // _STEPS_AN_EPOCH), "iterations_per_epoch": _STEPS_AN_EPOCH}
    for iteration in range(1, steps + 1):
        like = kinds["step"][iteration % len(kinds["step"])]
        seconds = like["seconds"] * chance.uniform(0.9, 1.2)
        now += seconds
        done = {"time": now, "iteration": iteration}
        values = {
            "epoch": (iteration - 1) // _STEPS_AN_EPOCH + 1,
            "loss": 2.0 * iteration**-0.2 + chance.gauss(0, 0.02),
            "learning_rate": 0.1 * (1 - iteration / (steps + 1)),
            "seconds": seconds,
            "communication_seconds": seconds * chance.uniform(0.05, 0.3),
        }
        yield {**like, **done, **values}
        if iteration % _STEPS_A_READING == 0:
            yield {**kinds["energy"][0], **done}
        if iteration % _STEPS_AN_EPOCH == 0:
            yield {**kinds["checkpoint"][0], **done, "epoch": values["epoch"]}
            yield {**kinds["epoch"][0], "time": now, "epoch": values["epoch"], "train_loss": values["loss"]}
    yield {**kinds["end"][0], "time": now, "seconds": now - kinds["start"][0]["time"]}


if __name__ == "__main__":
    main()
