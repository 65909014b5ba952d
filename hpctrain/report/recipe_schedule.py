"""A recipe's batch, learning rate and momentum over a run, for a number of ranks."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from hpctrain.common.errors import HpctrainError
from hpctrain.common.optim.learning_rate import learning_rate
from hpctrain.common.recipes.optimizers import Optimizer
from hpctrain.common.recipes.schema import Recipe
from hpctrain.common.recipes.sections import Data
from hpctrain.report.output import table

if TYPE_CHECKING:
    from rich.table import Table

# ILSVRC 2012 (Russakovsky et al. 2015, arXiv 1409.0575, table 2).
_IMAGENET = 1_281_167
# The UCI test set that scikit-learn ships (Alpaydin and Kaynak 1998).
_DIGITS = 1_797
# The tokens of OpenWebText (nanoGPT at 3adf61e1, data/openwebtext/prepare.py, line 77), and of a window of its recipe.
_OPENWEBTEXT, _CONTEXT = 9_035_582_198, 1024


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
    """The recipe for ``world`` ranks; None where its batch does not depend on their number."""
    if world is None and recipe.batch.fixed_size is None:
        raise HpctrainError(
            "HT-argument-missing",
            "{recipe} has {per_rank} samples a rank: the rate depends on the number of ranks",
            "name it: --world 8",
            recipe=recipe.name,
            per_rank=recipe.batch.per_rank,
        )
    # Without a number of ranks, the batch is fixed, and the mesh does not matter.
    return recipe.at(world) if world else recipe.at_data_ranks(1)


def schedule(recipe: Recipe) -> dict[str, Any]:
    """The figures of the run by a recipe of :func:`at_world`.

    The lists have a value for the start of each epoch and one for the end of the last.
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


def schedule_table(figures: dict[str, Any]) -> Table:
    """The table of :func:`schedule`."""
    length = "1 epoch" if figures["epochs"] == 1 else f"{figures['epochs']} epochs"
    samples = figures["samples_per_epoch"]
    images = -(-samples // figures["repeats"])
    title = (
        f"{figures['name']}: batch {figures['global_batch']}, {length} of {figures['iterations_per_epoch']} iterations "
        f"over {samples:,} samples" + (f", {images:,} images {figures['repeats']} times" if images < samples else "")
    )
    epochs = [*map(str, range(figures["epochs"])), "end"]
    rates = [f"{rate:.6g}" for rate in figures["learning_rate"]]
    kept = [f"{share:g}" for share in figures["momentum"]]
    return table(("epoch", "learning rate", "momentum"), zip(epochs, rates, kept, strict=True), title=title)
