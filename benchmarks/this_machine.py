"""How far predictions for this machine are from what it does: ``python benchmarks/this_machine.py``.

Steps without communication are measured on 1 and 2 ranks, and all-reduces of 2. Steps of 4 ranks over each engine are
predicted from these, and measured. It takes ten minutes, and means something only where nothing else runs.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from hpctrain.common.workloads.workload import load_workload
from hpctrain.control.predict.calibration import read_calibration
from hpctrain.control.predict.network import stated_network
from hpctrain.control.predict.prediction import Node, predict
from hpctrain.control.predict.training import script_training

# By what `bench step` calls the variant.
_ENGINES = {"mpi": "hpctrain over mpi", "gloo": "hpctrain over gloo", "horovod": "hpctrain over horovod"}
_BATCHES = {"convnet": 16, "transformer": 8}


def main() -> None:
    """This machine's steps of 4 ranks, predicted from 1 and 2."""
    print("| network | engine | measured ms | predicted | error |\n|---|---|--:|--:|--:|")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        curves = folder / "curves.json"
        curves.write_text(_bench("allreduce", "-np", "2", "--rounds", "10"))
        for model, batch in _BATCHES.items():
            sweeps = [folder / f"{model}{ranks}.json" for ranks in (1, 2)]
            for ranks, sweep in enumerate(sweeps, start=1):
                sweep.write_text(_bench("step", "--sweep", "-np", str(ranks), "--model", model, "--rounds", "15"))
            measured = json.loads(_bench("step", "-np", "4", "--model", model, "--rounds", "15"))
            seconds = {row["variant"]: row["median_s"] for row in measured["rows"]}
            for engine, variant in _ENGINES.items():
                if variant not in seconds:
                    print(f"| {model} | {engine} | not measured | | |")
                    continue
                found = (
                    predict(
                        script_training(load_workload(model), per_rank=batch),
                        Node(gpu="cpu", local=4, engine=engine),
                        [stated_network(1, adapters=1, bytes_per_s=1e9)],
                        calibration=read_calibration([*sweeps, curves]),
                    )
                    .rows[0]
                    .step_s
                )
                low, value, high = (each * 1e3 for each in (found.low, found.value, found.high))
                real = seconds[variant] * 1e3
                missed = "" if low <= real <= high else " *"
                cells = f"{real:.1f} | {value:.1f} [{low:.1f}, {high:.1f}]{missed} | {value / real - 1:+.1%}"
                print(f"| {model} | {engine} | {cells} |")


def _bench(*arguments: str) -> str:
    """What ``hpctrain bench … --json`` prints."""
    command = [sys.executable, "-m", "hpctrain", "bench", *arguments, "--json"]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


if __name__ == "__main__":
    main()
