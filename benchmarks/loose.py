"""What training out of step costs and saves: ``python benchmarks/loose.py --out loose.json --plot loose.svg``.

Trains ``digits``, or with ``--task gpt`` a small transformer, in step, by local SGD, by DiLoCo and by a parameter
server, several seeds each, in one start of MPI ranks of which the last is slower. A step's computing is made longer by
sleeping, as if an accelerator computed: ranks that share few cores do not hold each other up then, and another program
on the machine matters less. The table has the medians over the seeds of what it took to reach the task's goal;
``--read FILE`` shows a study that was made.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table

from hpctrain.common.recipes.load import load_recipe, override_recipe
from hpctrain.common.recipes.schema import Recipe
from hpctrain.common.recipes.smoke import smoke

_ADAMW = "optimizer={name: adamw, learning_rate: 1.0e-3, weight_decay: 0.01}"
_LOCAL = ("sync.every=8",)
_OUTER = ("sync={every: 8, outer: {optimizer: nesterov}}",)
_SERVER = {
    "async, Downpour": ("sync.mode=async",),
    "async, EASGD, 4 steps": ("sync={mode: async, rule: easgd, every: 4}",),
}


@dataclass(frozen=True, kw_only=True)
class Point:
    """How far a run was at the end of an epoch; bytes are those of all ranks."""

    seconds: float
    samples: int
    bytes: float
    loss: float
    accuracy: float


@dataclass(frozen=True, kw_only=True)
class Task:
    """What is trained, until what is reached.

    Attributes:
        overrides: of the recipe, for every method.
        methods: what each changes besides.
        goal: as it is printed.
        met: whether a point is there.
    """

    recipe: str
    small: bool
    overrides: tuple[str, ...]
    methods: dict[str, tuple[str, ...]]
    goal: str
    met: Callable[[Point], bool]


TASKS = {
    "digits": Task(
        recipe="digits",
        small=False,
        overrides=("epochs=8", "data.split_seed=7"),
        methods={
            "synchronous": (),
            "synchronous, AdamW": (_ADAMW,),
            "local SGD, 8 steps": _LOCAL,
            "DiLoCo, 8 steps": (_ADAMW, *_OUTER),
            **_SERVER,
        },
        goal="a test accuracy of 0.97",
        met=lambda point: point.accuracy >= 0.97,
    ),
    # Its optimizer is AdamW. An epoch is 50 steps.
    "gpt": Task(
        recipe="gpt2-124m",
        small=True,
        overrides=("epochs=8", "data.epoch_samples=800"),
        methods={"synchronous": (), "local AdamW, 8 steps": _LOCAL, "DiLoCo, 8 steps": _OUTER, **_SERVER},
        goal="a test loss of 2.7",
        met=lambda point: point.loss <= 2.7,
    ),
}


@dataclass(frozen=True, kw_only=True)
class Run:
    """One training; ``steps`` are each rank's."""

    method: str
    seed: int
    steps: tuple[int, ...]
    points: tuple[Point, ...]

    def reached(self, task: Task) -> Point | None:
        """The first end of an epoch at which the goal is reached."""
        return next((point for point in self.points if task.met(point)), None)


def _recipe(task: Task, method: str, seed: int, ranks: int) -> Recipe:
    whole = load_recipe(task.recipe)
    given = (f"seed={seed}", *task.overrides, *task.methods[method])
    return override_recipe(smoke(whole) if task.small else whole, given).at(ranks)


def _train(comm: Any, task: Task, method: str, seed: int, seconds: float, folder: Path) -> Run:
    """One training on all ranks, whose computing takes so many seconds a step, and what rank 0 recorded."""
    from hpctrain.common.run.events import EventWriter, read_events
    from hpctrain.worker.data import open_sources
    from hpctrain.worker.train.asynchronous import AsynchronousLoop
    from hpctrain.worker.train.checkpoint_saving import Checkpoints
    from hpctrain.worker.train.loop import Loop
    from hpctrain.worker.train.torch_trainer import TorchTrainer

    recipe = _recipe(task, method, seed, comm.size)
    trainer = TorchTrainer(recipe, comm)
    trainer.model.register_forward_pre_hook(lambda model, _: time.sleep(seconds) if model.training else None)
    train, test = open_sources(recipe)
    kind = AsynchronousLoop if recipe.sync and recipe.sync.mode == "async" else Loop
    path = folder / f"{method}-{seed}.jsonl"
    with EventWriter(path if comm.rank == 0 else None) as events:
        checkpoints = Checkpoints(folder / f"{method}-{seed}", comm, events)
        loop = kind(recipe, comm, trainer, train, test, events, checkpoints=checkpoints)
        loop.run()
    steps = tuple(comm.allgather_object(trainer.updates))
    comm.barrier()
    samples = recipe.data.epoch_samples or len(train)
    return Run(method=method, seed=seed, steps=steps, points=_points(list(read_events(path)), recipe, steps, samples))


def _points(events: list[Any], recipe: Recipe, steps: tuple[int, ...], samples: int) -> tuple[Point, ...]:
    """By the clock of the whole run, evaluation and checkpoints included."""
    begun = next(event for event in events if event.event == "run")
    everyone = _exchanged(recipe, begun, steps)
    epochs = [event for event in events if event.event == "epoch"]
    return tuple(
        Point(
            seconds=event.time - begun.time,
            samples=samples * event.epoch,
            bytes=everyone * event.epoch / len(epochs),
            loss=event.test_loss,
            accuracy=event.test_accuracy,
        )
        for event in epochs
    )


def _exchanged(recipe: Recipe, begun: Any, steps: tuple[int, ...]) -> float:
    """The bytes that all ranks gave to reductions, or exchanged with the server, each time all parameters."""
    whole, sync = 4 * begun.parameters, recipe.sync
    if sync and sync.mode == "async":
        return 2 * whole * sum(steps) / sync.every
    meetings = recipe.epochs * -(-begun.iterations_per_epoch // (sync.every if sync else 1))
    return whole * meetings * len(steps)


def _rank(options: argparse.Namespace) -> None:
    """All trainings, on one of the ranks."""
    import hpctrain as ht

    comm = ht.init()
    slow = comm.rank == comm.size - 1
    task = TASKS[options.task]
    seconds = options.pace / 1000 * (options.slower if slow else 1)
    runs = []
    with tempfile.TemporaryDirectory() as folder:
        shared = Path(comm.broadcast_object(folder))
        for seed in range(options.seeds):
            for method in task.methods:
                begin = os.getloadavg()[0]
                runs.append(_train(comm, task, method, seed, seconds, shared))
                comm.say(f"{method}, seed {seed}: {runs[-1].points[-1]}, load {begin:.1f}")
            if comm.rank == 0:
                _write(options, seed + 1, runs)
        comm.barrier()


def _write(options: argparse.Namespace, seeds: int, runs: list[Run]) -> None:
    settings = {key: vars(options)[key] for key in ("task", "ranks", "pace", "slower")}
    study = {**settings, "seeds": seeds, "load": os.getloadavg(), "runs": [asdict(run) for run in runs]}
    options.out.write_text(json.dumps(study, indent=1))


def _read(path: Path) -> tuple[dict[str, Any], list[Run]]:
    study = json.loads(path.read_text())
    runs = [
        Run(**{**run, "steps": tuple(run["steps"]), "points": tuple(Point(**point) for point in run["points"])})
        for run in study["runs"]
    ]
    return study, runs


def _table(study: dict[str, Any], runs: list[Run]) -> Table:
    task = TASKS[study["task"]]
    title = (
        f"{task.goal} on {task.recipe}, {study['ranks']} ranks, {study['pace']:g} ms a step, the last rank "
        f"{study['slower']:g} x slower, medians of {study['seeds']} seeds"
    )
    table = Table(
        "method",
        "seeds that reached it",
        "seconds",
        "samples",
        "MB sent",
        "lowest loss",
        "best accuracy",
        "steps a rank",
        title=title,
    )
    for method in task.methods:
        own = [run for run in runs if run.method == method]
        reached = [point for run in own if (point := run.reached(task))]
        middle = [
            f"{statistics.median(getattr(point, key) for point in reached) / unit:,.{digits}f}" if reached else "-"
            for key, unit, digits in (("seconds", 1, 1), ("samples", 1, 0), ("bytes", 1e6, 0))
        ]
        lowest = statistics.median(min(point.loss for point in run.points) for run in own)
        best = statistics.median(max(point.accuracy for point in run.points) for run in own)
        steps = "/".join(f"{statistics.mean(each):.0f}" for each in zip(*(run.steps for run in own), strict=True))
        table.add_row(method, f"{len(reached)} of {len(own)}", *middle, f"{lowest:.3f}", f"{best:.3f}", steps)
    return table


def _plot(task: Task, runs: list[Run], path: Path) -> None:
    """The test loss, the mean over the seeds, against samples, seconds and bytes."""
    figure = Figure(figsize=(11, 3.6), layout="constrained")
    axes = figure.subplots(1, 3, sharey=True)
    for method in task.methods:
        own = [run.points for run in runs if run.method == method]
        for axis, (key, unit, title) in zip(
            axes, (("samples", 1e3, "1000 samples"), ("seconds", 1, "s"), ("bytes", 1e6, "MB sent")), strict=True
        ):
            at = [statistics.mean(getattr(point, key) for point in points) / unit for points in zip(*own, strict=True)]
            loss = [statistics.mean(point.loss for point in points) for points in zip(*own, strict=True)]
            axis.plot(at, loss, marker=".", label=method)
            axis.set(xlabel=title, yscale="log")
    axes[2].set_xscale("log")
    axes[0].set_ylabel("test loss")
    axes[0].legend(fontsize="x-small")
    figure.savefig(path)


def _start(options: argparse.Namespace) -> int:
    """Start the ranks."""
    mpirun = Path(sys.executable).parent / "mpirun"
    command = [str(mpirun), "--oversubscribe", "--allow-run-as-root", "--bind-to", "none", "--mca", "osc", "^ucx"]
    command += ["-np", str(options.ranks), sys.executable, __file__, *sys.argv[1:], "--as-rank"]
    return subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=False).returncode


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--task", choices=list(TASKS), default="digits")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument(
        "--pace", type=float, default=20.0, help="milliseconds that a step's computing is made longer by"
    )
    parser.add_argument("--slower", type=float, default=2.0, help="so many times as long on the last rank")
    parser.add_argument("--out", type=Path, default=Path("loose.json"))
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--read", type=Path)
    parser.add_argument("--as-rank", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.as_rank:
        _rank(options)
        return 0
    if not options.read and (failed := _start(options)):
        return failed
    study, runs = _read(options.read or options.out)
    Console(width=140).print(_table(study, runs))
    if options.plot:
        _plot(TASKS[study["task"]], runs, options.plot)
    return 0


if __name__ == "__main__":
    sys.exit(main())
