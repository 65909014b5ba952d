"""The samples that recipes name."""

from __future__ import annotations

from hpctrain.data.samples import InMemory
from hpctrain.data.source import Source
from hpctrain.recipes.schema import Recipe


def open_sources(recipe: Recipe) -> tuple[Source, Source]:
    """What a recipe trains on, and what it is validated with.

    Raises:
        HpctrainError: the recipe's data are not there, or not whole.
    """
    if recipe.data.name == "digits":
        from hpctrain.data.digits import load_digits

        seed = recipe.seed if recipe.data.split_seed is None else recipe.data.split_seed
        train, test = load_digits(test_fraction=recipe.data.test_fraction, seed=seed)
        return InMemory(samples=train), InMemory(samples=test)
    raise NotImplementedError
