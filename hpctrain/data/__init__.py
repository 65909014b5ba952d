"""The samples that recipes name."""

from __future__ import annotations

from pathlib import Path

from hpctrain.data.samples import InMemory
from hpctrain.data.source import Source
from hpctrain.errors import HpctrainError
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
    return _imagenet(recipe)


def _imagenet(recipe: Recipe) -> tuple[Source, Source]:
    from hpctrain.data.loader import ImageNet

    if not recipe.data.path:
        raise HpctrainError(
            f"recipe {recipe.name} needs data.path, the folder of ImageNet's shards",
            "--set data.path=DIR; hpctrain data shard SOURCE DIR makes it, hpctrain data fake a small one to try with",
        )
    folder = Path(recipe.data.path).expanduser()
    return ImageNet(folder, "train", recipe), ImageNet(folder, "val", recipe)
