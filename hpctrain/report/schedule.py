"""A recipe's batch, learning rate and momentum over a run, for a number of ranks."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from hpctrain.common.errors import HpctrainError
from hpctrain.common.optim.schedule import LearningRate, learning_rate
from hpctrain.common.recipes.schema import Recipe
from hpctrain.common.recipes.sections import Data, Optimizer
from hpctrain.report.pictures import BLUE, picture

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from rich.table import Table

# ILSVRC 2012 (Russakovsky et al. 2015, arXiv 1409.0575, table 2).
_IMAGENET = 1_281_167
# The UCI test set that scikit-learn ships (Alpaydin and Kaynak 1998).
_DIGITS = 1_797
# The tokens of OpenWebText (nanoGPT at 3adf61e1, data/openwebtext/prepare.py, line 77), and of a window of its recipe.
_OPENWEBTEXT, _CONTEXT = 9_035_582_198, 1024
# A picture cannot show more.
_POINTS = 2000
# Values whose ratio exceeds _WIDE get a logarithmic axis, which ends at _LOWEST of the highest.
_WIDE, _LOWEST = 100, 1e-4


def training_samples(data: Data) -> int:
    """The number of training samples. For ImageNet it is that of the whole set, whatever ``path`` holds, or ``limit``;
    for text that of OpenWebText.
    """
    if data.name == "text":
        return _OPENWEBTEXT // _CONTEXT - 1
    if data.name == "imagenet":
        return min(_IMAGENET, data.limit or _IMAGENET)
    return _DIGITS - math.ceil(_DIGITS * data.test_fraction)


def at_world(recipe: Recipe, world: int | None) -> Recipe:
    """The recipe for ``world`` ranks.

    Raises:
        HpctrainError: the batch depends on the number of ranks, and it is None; or there are too many for the mesh, or
            for an epoch to have a step.
    """
    each, samples = recipe.batch.per_rank, recipe.data.per_epoch(training_samples(recipe.data))
    if world is None and recipe.batch.fixed_size is None:
        raise HpctrainError(
            "HT-argument-missing",
            "{recipe} has {per_rank} samples a rank: the rate depends on the number of ranks",
            "name it: --world 8",
            recipe=recipe.name,
            per_rank=recipe.batch.per_rank,
        )
    # Without a number of ranks, the batch is fixed, and the mesh does not matter.
    found = recipe.at(world) if world else recipe.at_data_ranks(1)
    if each and not found.batch.iterations(samples):
        emulated = recipe.batch.emulated_ranks
        data = recipe.mesh.at(world).data_ranks if world else 1
        ranks, option = (f"{emulated} emulated", "--set batch.emulated_ranks=") if emulated else (data, "--world ")
        most = samples // each * (1 if emulated or not world else world // data)
        raise HpctrainError(
            "HT-batch-too-large",
            "{ranks} ranks with {batch} samples each leave no step: there are {samples} training samples",
            f"{option}{most} or less" if samples >= each else f"--set batch.per_rank={samples} or less",
            ranks=ranks,
            batch=each,
            samples=samples,
        )
    return found


def schedule(recipe: Recipe) -> dict[str, Any]:
    """The figures of the run by a recipe of :func:`at_world`.

    The lists have a value for the start of each epoch and one for the end of the last.

    Raises:
        HpctrainError: an epoch would have no step.
    """
    samples = training_samples(recipe.data)
    rate = learning_rate(recipe, samples)
    return {
        "name": recipe.name,
        "global_batch": recipe.global_batch,
        "epochs": recipe.epochs,
        "training_samples": samples,
        "samples_per_epoch": recipe.data.per_epoch(samples),
        "repeats": recipe.data.repeats,
        "iterations_per_epoch": rate.iterations_per_epoch,
        "learning_rate": [rate(epoch * rate.iterations_per_epoch) for epoch in range(recipe.epochs + 1)],
        "momentum": [momentum(recipe.optimizer)] * (recipe.epochs + 1),
        "source": recipe.source,
        "reported": [row.model_dump(mode="json") for row in recipe.reported],
    }


def momentum(optimizer: Optimizer) -> float:
    """The decay of the mean of past gradients; for Adam and similar optimizers the first of ``betas``."""
    return optimizer.betas[0] if optimizer.rule.averages else optimizer.momentum


def table(found: dict[str, Any]) -> Table:
    """The table of :func:`schedule`."""
    from rich import box
    from rich.markup import escape
    from rich.table import Table

    epochs = "1 epoch" if found["epochs"] == 1 else f"{found['epochs']} epochs"
    samples = found["samples_per_epoch"]
    images = -(-samples // found["repeats"])
    title = (
        f"{found['name']}: batch {found['global_batch']}, {epochs} of {found['iterations_per_epoch']} iterations over "
        f"{samples:,} samples" + (f", {images:,} images {found['repeats']} times" if images < samples else "")
    )
    rows = Table(title=escape(title), box=box.SIMPLE_HEAD)
    for column in ("epoch", "learning rate", "momentum"):
        rows.add_column(column, justify="right")
    for epoch, (rate, kept) in enumerate(zip(found["learning_rate"], found["momentum"], strict=True)):
        rows.add_row("end" if epoch == found["epochs"] else str(epoch), f"{rate:.6g}", f"{kept:g}")
    return rows


def plot(recipe: Recipe, kind: str = "png") -> bytes:
    """Plot batch, rate and momentum by a recipe of :func:`at_world`, in a format of
    :func:`hpctrain.report.pictures.picture_format`."""
    rate = learning_rate(recipe, training_samples(recipe.data))
    curves: dict[str, Callable[[float], float]] = {
        "batch": lambda iteration: recipe.global_batch,
        "learning rate": rate,
        "momentum": lambda iteration: momentum(recipe.optimizer),
    }
    iterations = _iterations(rate)
    epochs = [iteration / rate.iterations_per_epoch for iteration in iterations]
    with picture(6.4, 6.4) as (figure, content):
        panels = figure.subplots(3, 1, sharex=True, height_ratios=(1, 2.5, 1))
        for panel, (label, value) in zip(panels, curves.items(), strict=True):
            _draw(panel, label, epochs, [value(iteration) for iteration in iterations])
        panels[0].set_title(f"{recipe.name}: {rate.iterations_per_epoch} iterations an epoch", parse_math=False)
        panels[-1].set_xlabel("epoch")
        return content(kind)


def _iterations(rate: LearningRate) -> list[int]:
    """The iterations to plot: evenly spread, and on both sides of each epoch's begin, where rates jump."""
    each, last = rate.iterations_per_epoch, rate.epochs * rate.iterations_per_epoch
    spread = range(0, last + 1, max(1, last // _POINTS))
    edges = (edge for begin in range(each, last + 1, each) for edge in (begin - 1, begin))
    return sorted({0, last, *spread, *edges})


def _draw(panel: Axes, label: str, epochs: list[float], values: list[float]) -> None:
    panel.plot(epochs, values, color=BLUE, linewidth=1.6)
    panel.set(ylabel=label, xlim=(0, epochs[-1]), ylim=(0, 1.08 * max(values) or 1))
    positive = [value for value in values if value > 0]
    if positive and max(positive) > _WIDE * min(positive):
        panel.set_yscale("log", nonpositive="mask")
        panel.set_ylim(max(min(positive), _LOWEST * max(positive)) / 1.5, 1.5 * max(positive))
