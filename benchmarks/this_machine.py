"""How far predictions for this machine are from what it does.

    python benchmarks/this_machine.py
    python benchmarks/this_machine.py language-models RESULTS.csv [--sizes 4x128 …] [--ranks 2 …] [--rounds 5]

Steps without communication are measured on 1 and 2 ranks, and all-reduces of 2. Steps of 4 ranks over each engine are
predicted from these, and measured. It takes ten minutes.

``language-models`` trains GPTs of three sizes on every kind of mesh of 2 and 4 ranks, over mpi and gloo, for some
steps. They are predicted twice: from steps of one rank alone (the network of ``bench step --model gpt``, which is none
of the three), and with all-reduces of 2 ranks besides. It says in how many cases the range holds the median step, how
alike the orders of meshes are, and how much slower than the fastest mesh the one is that is predicted to be. It takes
seven minutes.

Both mean something only where nothing else runs; the load before each run is in the table.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from gpt_steps import recipe_of
from transformer_fit import Sweep

from hpctrain.common.recipes.load import load_recipe, override_recipe
from hpctrain.common.recipes.schema import Recipe
from hpctrain.common.recipes.smoke import smoke
from hpctrain.common.workloads.workload import load_workload
from hpctrain.control.predict.calibration import read_calibration
from hpctrain.control.predict.hardware import Hardware
from hpctrain.control.predict.network import stated_network
from hpctrain.control.predict.prediction import Node, predict
from hpctrain.control.predict.request import PredictionRequest, recipe_request
from hpctrain.control.predict.training import script_training

# By what `bench step` calls the variant.
_ENGINES = {"mpi": "hpctrain over mpi", "gloo": "hpctrain over gloo", "horovod": "hpctrain over horovod"}
_BATCHES = {"convnet": 16, "transformer": 8}


# Layers and width.
_SIZES = ("4x128", "4x192", "8x256")
_BACKENDS = ("mpi", "gloo")
_MESHES: Mapping[int, Sequence[str]] = {
    2: (
        "dp_replicate=2",
        "dp_shard=2",
        "tp=2",
        "pp=2",
        "pp=2:pipeline.schedule=gpipe",
        "pp=2:pipeline.schedule=interleaved_1f1b",
        "pp=2:pipeline.schedule=zbv",
    ),
    4: (
        "dp_replicate=4",
        "dp_shard=4",
        "dp_replicate=2,dp_shard=2",
        "tp=4",
        "dp_replicate=2,tp=2",
        "dp_shard=2,tp=2",
        "pp=4",
        "dp_replicate=2,pp=2",
        "dp_shard=2,pp=2",
        "pp=2,tp=2",
    ),
}
_GPT = (
    "precision=float32",
    "model.heads=4",
    "model.context=64",
    "model.vocabulary=2048",
    "batch.size=16",
    "batch.micro_batch=null",
)


@dataclass(frozen=True, kw_only=True)
class MeshCase:
    """A mesh that was timed, and its predictions: ``alone`` by steps of one rank, else with all-reduces of two."""

    size: str
    ranks: int
    backend: str
    mesh: str
    measured_s: float
    fastest_s: float
    slowest_s: float
    alone_s: float
    alone_low_s: float
    alone_high_s: float
    predicted_s: float
    low_s: float
    high_s: float
    load: float

    @property
    def held(self) -> tuple[bool, bool]:
        """Whether the ranges hold the median step."""
        return (
            self.alone_low_s <= self.measured_s <= self.alone_high_s,
            self.low_s <= self.measured_s <= self.high_s,
        )


def language_models(out: Path, sizes: Sequence[str], ranks: Sequence[int], rounds: int) -> None:
    """GPTs on meshes of this machine's ranks, predicted and measured."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        sweeps = [_gpt_sweep(folder / "first.json", rounds)]
        curves = folder / "curves.json"
        curves.write_text(_bench("allreduce", "-np", "2", "--sizes", "16K,256K,4M,16M", "--rounds", "7"))
        timed = []
        for count in ranks:
            for backend in _BACKENDS:
                timed.append((count, backend, os.getloadavg()[0], _steps(folder, sizes, count, backend, rounds)))
        # One before and one after the meshes, for a machine whose speed changes.
        sweeps.append(_gpt_sweep(folder / "last.json", rounds))
        cases = [
            _mesh_case(size, count, backend, load, case, seconds, (sweeps, [*sweeps, curves]))
            for count, backend, load, found in timed
            for size, by_case in found.items()
            for case, seconds in by_case.items()
        ]
    with out.open("w", encoding="utf-8", newline="") as stream:
        writer = csv.DictWriter(stream, [*asdict(cases[0])])
        writer.writeheader()
        writer.writerows(map(asdict, cases))
    _report(cases)


def _gpt_sweep(path: Path, rounds: int) -> Path:
    path.write_text(_bench("step", "--sweep", "-np", "1", "--model", "gpt", "--batch", "4", "--rounds", str(rounds)))
    return path


def _gpt(size: str) -> Recipe:
    layers, width = size.split("x")
    return override_recipe(smoke(load_recipe("gpt2-124m")), [*_GPT, f"model.layers={layers}", f"model.width={width}"])


def _steps(
    folder: Path, sizes: Sequence[str], ranks: int, backend: str, rounds: int
) -> dict[str, dict[str, list[float]]]:
    """Seconds of steps by size and mesh."""
    base, out = folder / "recipe.json", folder / "steps.json"
    base.write_text(_gpt(sizes[0]).model_dump_json())
    changed = {
        f"{mesh}:model.layers={layers}:model.width={width}": (f"{layers}x{width}", mesh)
        for layers, width in (size.split("x") for size in sizes)
        for mesh in _MESHES[ranks]
    }
    program = Path(__file__).with_name("gpt_steps.py")
    command = [sys.executable, "-m", "hpctrain", "run", "-np", str(ranks), "--backend", backend, "--oversubscribe"]
    command += [str(program), "--", str(out), str(base), str(rounds), *changed]
    subprocess.run(command, check=True, cwd=folder, stdout=subprocess.DEVNULL)
    found: dict[str, dict[str, list[float]]] = defaultdict(dict)
    for case, seconds in json.loads(out.read_text()).items():
        size, mesh = changed[case]
        found[size][mesh] = seconds
    return found


def _mesh_case(
    size: str,
    ranks: int,
    backend: str,
    load: float,
    mesh: str,
    seconds: Sequence[float],
    calibrations: Sequence[Sequence[Path]],
) -> MeshCase:
    alone, found = (
        recipe_request(
            recipe_of(_gpt(size), mesh),
            PredictionRequest(
                hardware=Hardware(gpu="cpu", gpus_per_node=ranks), nodes=[1], backend=backend, calibration=calibration
            ),
        )
        .rows[0]
        .step_s
        for calibration in calibrations
    )
    return MeshCase(
        size=size,
        ranks=ranks,
        backend=backend,
        mesh=mesh,
        measured_s=statistics.median(seconds),
        fastest_s=min(seconds),
        slowest_s=max(seconds),
        alone_s=alone.value,
        alone_low_s=alone.low,
        alone_high_s=alone.high,
        predicted_s=found.value,
        low_s=found.low,
        high_s=found.high,
        load=round(load, 2),
    )


def _report(cases: Sequence[MeshCase]) -> None:
    print("| size | ranks | backend | mesh | measured ms | predicted | error | by one rank alone |")
    print("|---|--:|---|---|--:|--:|--:|--:|")
    groups: dict[Any, list[MeshCase]] = defaultdict(list)
    for case in cases:
        groups[case.size, case.ranks, case.backend].append(case)
        low, value, high, alone = (1e3 * each for each in (case.low_s, case.predicted_s, case.high_s, case.alone_s))
        cells = f"{1e3 * case.measured_s:.1f} | {value:.1f} [{low:.1f}, {high:.1f}]{'' if case.held[1] else ' *'}"
        cells += f" | {case.predicted_s / case.measured_s - 1:+.1%} | {alone:.1f}{'' if case.held[0] else ' *'}"
        print(f"| {case.size} | {case.ranks} | {case.backend} | {case.mesh} | {cells} |")
    print("\n| size | ranks | backend | Kendall's tau | fastest | picked | slower by |\n|---|--:|---|--:|---|---|--:|")
    regrets, taus, right = [], [], 0
    for (size, ranks, backend), own in groups.items():
        rates = Sweep(size, [1 / case.measured_s for case in own], [1 / case.predicted_s for case in own])
        best = min(own, key=lambda case: case.measured_s)
        pick = min(own, key=lambda case: case.predicted_s)
        regret = pick.measured_s / best.measured_s - 1
        regrets.append(regret)
        taus.append(rates.tau)
        right += pick is best
        print(f"| {size} | {ranks} | {backend} | {rates.tau:.2f} | {best.mesh} | {pick.mesh} | {regret:.1%} |")
    errors = [abs(case.predicted_s / case.measured_s - 1) for case in cases]
    alone, both = (sum(case.held[at] for case in cases) for at in (0, 1))
    loads = [case.load for case in cases]
    print(
        f"\nthis machine: {len(cases)} meshes, median error {statistics.median(errors):.1%}; ranges hold {both} of "
        f"{len(cases)} ({alone} by one rank alone); tau {statistics.median(taus):.2f} in the median; the fastest mesh "
        f"picked in {right} of {len(groups)}, slower by {statistics.median(regrets):.1%} in the median and "
        f"{max(regrets):.1%} at most; load {min(loads)} to {max(loads)}"
    )


def data_parallel() -> None:
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command")
    models = commands.add_parser("language-models")
    models.add_argument("results", type=Path)
    models.add_argument("--sizes", nargs="+", default=_SIZES, metavar="LAYERSxWIDTH")
    models.add_argument("--ranks", nargs="+", type=int, default=[*_MESHES], choices=[*_MESHES])
    models.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    if options.command:
        language_models(options.results, options.sizes, options.ranks, options.rounds)
    else:
        data_parallel()


if __name__ == "__main__":
    main()
