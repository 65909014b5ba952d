"""Recipes of a small network, for tests of the loop and of the trainers."""

from __future__ import annotations

import json
from typing import Any

from hpctrain.common.recipes.schema import Recipe


def digits_recipe(**values: Any) -> Recipe:
    """One epoch with plain SGD in batches of 32, unless ``values`` say otherwise."""
    base = {
        "name": "test",
        "source": "none",
        "reported": [{"metric": "test_accuracy", "value": 1.0}],
        "model": {"name": "digits_cnn"},
        "data": {"name": "digits"},
        "batch": {"size": 32},
        "optimizer": {"name": "sgd", "learning_rate": 0.1},
        "epochs": 1,
    }
    return Recipe.model_validate_json(json.dumps({**base, **values}))
