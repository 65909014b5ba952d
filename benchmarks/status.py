"""What ``hpctrain status`` and the merging of logs cost: ``python benchmarks/status.py``."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from hpctrain.cli.logs import merge

_STEPS, _STEPS_AN_EPOCH = 100_000, 1_000
_RANKS, _LINES = 64, 10_000
_REPEATS = 7


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder)
        _write_run(run)
        command = [sys.executable, "-c", "from hpctrain.cli.main import main; main()", "status", str(run)]
        seconds = sorted(_seconds(command) for _ in range(_REPEATS))
        size = (run / "events.jsonl").stat().st_size / 1e6
        print(f"status of {_STEPS:,} steps ({size:.0f} MB): median {statistics.median(seconds):.2f} s of {_REPEATS}")
    base = [f"step {number}" for number in range(_LINES)]
    for name, lines in (
        ("identical", dict.fromkeys(range(_RANKS), base)),
        ("all different", {rank: [f"{rank} {line}" for line in base] for rank in range(_RANKS)}),
    ):
        begin = time.perf_counter()
        merged = sum(1 for _ in merge(lines))
        print(f"merge {_RANKS} x {_LINES:,} {name} lines into {merged:,}: {time.perf_counter() - begin:.2f} s")


def _seconds(command: list[str]) -> float:
    begin = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - begin


def _write_run(run: Path) -> None:
    plan = {"script": {"path": "train.py"}, "ranks": 2, "threads_per_rank": 1}
    (run / "plan.json").write_text(json.dumps(plan))
    shape = {"epochs": _STEPS // _STEPS_AN_EPOCH, "iterations_per_epoch": _STEPS_AN_EPOCH, "parameters": 1}
    with (run / "events.jsonl").open("w") as file:
        first = {"time": 0.5, "event": "run", "recipe": "r", "framework": "torch", "backend": "horovod", "ranks": 2}
        file.write(json.dumps({**first, **shape}) + "\n")
        for iteration in range(1, _STEPS + 1):
            now = 1_700_000_000.123456 + iteration / 2
            epoch = (iteration - 1) // _STEPS_AN_EPOCH + 1
            step = {
                "time": now,
                "event": "step",
                "iteration": iteration,
                "epoch": epoch,
                "loss": 1.23456789 / iteration,
            }
            measured = {"learning_rate": 0.1 / iteration, "samples": 64, "seconds": 0.4321098765432}
            file.write(json.dumps({**step, **measured, "communication_seconds": 0.1234567890123}) + "\n")
            if iteration % _STEPS_AN_EPOCH == 0:
                done = {"time": now, "event": "epoch", "epoch": epoch, "seconds": 500.0, "samples_per_s": 128.0}
                file.write(json.dumps({**done, "train_loss": 1.0, "test_loss": 1.0, "test_accuracy": 0.9}) + "\n")


if __name__ == "__main__":
    main()
