"""How large a batch may be: ``python benchmarks/large_minibatch.py --out study.json --plot study.png``.

Figure 3 and table 1 of Goyal et al. 2017 (arXiv 1706.02677) in miniature, by the recipe ``digits-large-minibatch``. The
seed changes initial weights and order, not which images are tested with. ``--read FILE`` shows a study that was made.
"""

from __future__ import annotations

import argparse
import itertools
import json
import platform
import statistics
import tempfile
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table

from hpctrain.common.recipes.load import load_recipe
from hpctrain.common.recipes.schema import Recipe
from hpctrain.common.run.events import EventWriter, read_events
from hpctrain.common.run.events.kinds import EpochEvent

RECIPE = "digits-large-minibatch"
BATCHES = (16, 32, 64, 128, 256, 512, 1024)
# What each rule changes in the recipe.
RULES = {
    "gradual": (),
    "constant": ("schedule.warmup=constant",),
    "none": ("schedule.warmup_epochs=0",),
    "unscaled": ("schedule.base_batch=null", "schedule.warmup_epochs=0"),
}
TITLES = {
    "gradual": "linear rule, gradual warm-up",
    "constant": "linear rule, constant warm-up",
    "none": "linear rule, no warm-up",
    "unscaled": "no linear rule",
}
_STYLES = {
    "gradual": ("#0b6e99", "o"),
    "constant": ("#7a5195", "s"),
    "none": ("#d1495b", "^"),
    "unscaled": ("#8a8a8a", "D"),
}
_ERRORS = (1, 2, 5, 10, 20, 50, 100)


@dataclass(frozen=True, kw_only=True)
class Case:
    """One training of the study; ``settings`` are overrides of the recipe for all of them."""

    batch: int
    rule: str
    seed: int
    settings: tuple[str, ...] = ()

    def recipe(self) -> Recipe:
        own = (f"batch.size={self.batch}", f"seed={self.seed}", *RULES[self.rule])
        return load_recipe(RECIPE, (*self.settings, *own)).at(1)


@dataclass(frozen=True, kw_only=True)
class Run:
    """What became of a case.

    Attributes:
        error: test error in %, the median of the recipe's last epochs.
        wrong: test images classified wrongly after each epoch.
    """

    batch: int
    rule: str
    seed: int
    error: float
    wrong: tuple[int, ...]


def main(arguments: Sequence[str] | None = None) -> None:
    options = _options(arguments)
    if options.read:
        study = json.loads(options.read.read_text())
    else:
        study = make(options.batches, options.rules, options.seeds, tuple(options.set), options.processes)
    runs = [Run(**{**run, "wrong": tuple(run["wrong"])}) for run in study["runs"]]
    Console().print(table(runs))
    if options.out:
        options.out.write_text(to_json(study))
    if options.plot:
        draw(runs).savefig(options.plot, dpi=150)


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, nargs="+", default=BATCHES)
    parser.add_argument("--rules", nargs="+", choices=RULES, default=list(RULES))
    parser.add_argument("--seeds", type=int, default=5, help="trainings of each case, with seeds from 0 on")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="change a value of the recipe")
    parser.add_argument("--processes", type=int, default=2, help="of one thread each, at the same time")
    parser.add_argument("--read", type=Path, metavar="FILE.json", help="train nothing, show this study")
    parser.add_argument("--out", type=Path, metavar="FILE.json")
    parser.add_argument("--plot", type=Path, metavar="FILE.png")
    return parser.parse_args(arguments)


def make(
    batches: Sequence[int], rules: Sequence[str], seeds: int, settings: tuple[str, ...], processes: int
) -> dict[str, Any]:
    """The study: the recipe, the versions, and a run for each case."""
    recipe = load_recipe(RECIPE, settings)
    base = recipe.schedule.base_batch
    # Where the batch is the rule's own, every rule is the same training.
    cases = [
        Case(batch=batch, rule=rule, seed=seed, settings=settings)
        for seed, batch in itertools.product(range(seeds), batches)
        for rule in (rules[:1] if batch == base else rules)
    ]
    runs = []
    with ProcessPoolExecutor(processes, get_context("spawn"), initializer=_one_thread) as pool:
        for future in as_completed([pool.submit(train, case) for case in cases]):
            run = future.result()
            runs += [replace(run, rule=rule) for rule in (rules if run.batch == base else [run.rule])]
            print(f"batch {run.batch}, {TITLES[run.rule]}, seed {run.seed}: {run.error:.2f} %", flush=True)
    runs.sort(key=lambda run: (run.batch, list(RULES).index(run.rule), run.seed))
    versions = {name: version(name) for name in ("hpctrain", "torch", "numpy", "scikit-learn")}
    return {
        "recipe": recipe.model_dump(mode="json", exclude={"source", "reported"}, exclude_defaults=True),
        "versions": {"python": platform.python_version(), **versions},
        "machine": platform.machine(),
        "runs": [asdict(run) for run in runs],
    }


def _one_thread() -> None:
    import torch

    torch.set_num_threads(1)


def train(case: Case) -> Run:
    """One training, as ``hpctrain run`` does it on one rank."""
    from hpctrain.worker.comm.single import SingleCommunicator
    from hpctrain.worker.data import open_sources
    from hpctrain.worker.train.checkpoint_saving import Checkpoints
    from hpctrain.worker.train.loop import Loop
    from hpctrain.worker.train.torch_trainer import TorchTrainer

    recipe, comm = case.recipe(), SingleCommunicator("one process a training")
    train, test = open_sources(recipe)
    with tempfile.TemporaryDirectory() as folder, EventWriter(Path(folder) / "events.jsonl") as events:
        checkpoints = Checkpoints(Path(folder) / "checkpoints", comm, events)
        trainer = TorchTrainer(recipe, comm)
        Loop(recipe, comm, trainer, train, test, events, checkpoints=checkpoints).run()
        epochs = [event for event in read_events(Path(folder) / "events.jsonl") if isinstance(event, EpochEvent)]
    accuracies = [epoch.test_accuracy for epoch in epochs if epoch.test_accuracy is not None]
    assert len(accuracies) == len(epochs)
    wrong = [round((1 - accuracy) * len(test)) for accuracy in accuracies]
    error = 100 * statistics.median(wrong[-recipe.median_of :]) / len(test)
    return Run(batch=case.batch, rule=case.rule, seed=case.seed, error=error, wrong=tuple(wrong))


def cells(runs: Iterable[Run]) -> dict[tuple[int, str], tuple[float, float]]:
    """Mean and deviation of the test error over the seeds, by batch and rule."""
    found: dict[tuple[int, str], list[float]] = {}
    for run in runs:
        found.setdefault((run.batch, run.rule), []).append(run.error)
    return {
        key: (statistics.mean(errors), statistics.stdev(errors) if len(errors) > 1 else 0.0)
        for key, errors in found.items()
    }


def table(runs: Sequence[Run]) -> Table:
    """A row a batch, a column a rule."""
    of, rules = cells(runs), [rule for rule in RULES if any(run.rule == rule for run in runs)]
    seeds = len({run.seed for run in runs})
    made = Table(
        "batch", *(TITLES[rule] for rule in rules), title=f"test error in %, mean ± deviation of {seeds} seeds"
    )
    for batch in sorted({run.batch for run in runs}):
        made.add_row(f"{batch}", *("{:.2f} ± {:.2f}".format(*of[batch, rule]) for rule in rules))
    return made


def to_json(study: dict[str, Any]) -> str:
    """A line a run."""
    *head, runs = study
    assert runs == "runs"
    lines = [f'"{key}": {json.dumps(study[key])}' for key in head]
    each = ",\n".join(json.dumps(run) for run in study["runs"])
    return "{\n" + ",\n".join([*lines, f'"runs": [\n{each}\n]']) + "\n}\n"


def draw(runs: Sequence[Run]) -> Figure:
    """Test error over the batch: a line a rule with bars of one deviation, a dot a run."""
    of, batches = cells(runs), sorted({run.batch for run in runs})
    figure = Figure(figsize=(7.5, 4.5), layout="constrained")
    axes = figure.subplots()
    for place, rule in enumerate(rule for rule in RULES if (batches[-1], rule) in of):
        means, deviations = zip(*(of[batch, rule] for batch in batches), strict=True)
        color, marker = _STYLES[rule]
        # Beside each other, so that none hides another.
        aside = 2 ** (0.09 * (place - 1.5))
        at = [batch * aside for batch in batches]
        axes.errorbar(at, means, deviations, color=color, marker=marker, markersize=5, capsize=3, label=TITLES[rule])
        own = [run for run in runs if run.rule == rule]
        axes.scatter([run.batch * aside for run in own], [run.error for run in own], s=9, color=color, alpha=0.35)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(batches, [f"{batch}" for batch in batches])
    axes.set_yticks(_ERRORS, [f"{error}" for error in _ERRORS])
    axes.set_yticks([], minor=True)
    axes.set(xlabel="batch", ylabel="test error, %", ylim=(0.7, 130))
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    return figure


if __name__ == "__main__":
    main()
