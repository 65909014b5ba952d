"""Trainers of either framework, by name."""

from __future__ import annotations

import importlib
from typing import Any

import pytest

from hpctrain.common.recipes.schema import Recipe
from hpctrain.worker.comm.single import SingleCommunicator

FRAMEWORKS = ("torch", "keras")


def new_trainer(framework: str, recipe: Recipe) -> Any:
    """A trainer on a single rank; the test is skipped where its framework is missing."""
    pytest.importorskip(framework)
    module = importlib.import_module(f"hpctrain.worker.train.{framework}_trainer")
    if framework == "keras":
        # The same names of variables in each, as in another process.
        module.keras.utils.clear_session()
    return getattr(module, f"{framework.capitalize()}Trainer")(recipe, SingleCommunicator("test"))
