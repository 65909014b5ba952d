"""How many epochs a recipe takes to its result."""

from __future__ import annotations

import numpy as np

from hpctrain.common.recipes.schema import Recipe
from hpctrain.control.predict.values import Values
from hpctrain.control.topology.fabric import Floats

# Epochs to 75.9 % top-1 by batch, the fewest and the most of 10 to 28 seeds (reference convergence points 4.0,
# rcps_resnet.json in https://github.com/mlcommons/logging).
_REFERENCE = (
    (1632, 33, 37),
    (3264, 34, 37),
    (4096, 39, 42),
    (8192, 41, 44),
    (32768, 55, 57),
    (49152, 67, 69),
    (65536, 83, 86),
)
_TARGET = 0.759


def epochs(recipe: Recipe, values: Values) -> tuple[Floats, str]:
    """The epochs, (columns,), and where they are from.

    A recipe that runs towards MLPerf's target with a batch within the reference convergence points takes as many as
    these did, by the logarithm of the batch; every other one takes its own.

    Args:
        recipe: for a number of ranks.
    """
    own = float(recipe.epochs)
    if not _has_reference(recipe):
        return np.full(values.columns, own), "the recipe's"
    batches, fewest, most = np.array(_REFERENCE, float).T
    place = np.log(recipe.global_batch)
    low, high = (float(np.interp(place, np.log(batches), ends)) for ends in (fewest, most))
    source = "MLPerf's reference convergence points 4.0, 10 to 28 seeds"
    if own < low:
        # Nobody trains on after the rate has fallen to its end.
        return np.full(values.columns, own), f"the recipe's; the target takes {low:.0f} to {high:.0f} by {source}"
    return np.minimum(values.between("convergence", low, (low + high) / 2, high), own), source


def _has_reference(recipe: Recipe) -> bool:
    within = _REFERENCE[0][0] <= recipe.global_batch <= _REFERENCE[-1][0]
    target = any(row.metric == "test_accuracy" and row.value == _TARGET for row in recipe.reported)
    return (
        recipe.model.name == "resnet50" and recipe.optimizer.name == "lars" and target and within and not recipe.smoke
    )
