"""Checks of a recipe against its run, before anything is started."""

from __future__ import annotations

from pathlib import Path

from hpctrain.errors import HpctrainError
from hpctrain.recipes.batch_statistics import require_span
from hpctrain.recipes.schema import Recipe


def require_recipe(recipe: Recipe, ranks: int) -> None:
    """Refuse values that do not fit this number of ranks, or whose data is missing.

    Args:
        recipe: that :meth:`~hpctrain.recipes.schema.Recipe.at` made for the ranks the run was begun with.
        ranks: how many there are now.

    Raises:
        HpctrainError: fewer ranks than ``fault_tolerance.min_ranks``, more than ``max_ranks``, no ``data.path``, or as
            of :func:`~hpctrain.recipes.batch_statistics.require_span`.
    """
    least = recipe.fault_tolerance.min_ranks
    if least > ranks:
        raise HpctrainError(
            f"fault_tolerance.min_ranks is {least}, and the run has {ranks} ranks",
            f"-np {least}, or --set fault_tolerance.min_ranks={ranks}",
        )
    most = recipe.fault_tolerance.max_ranks
    if most is not None and most < ranks:
        raise HpctrainError(
            f"fault_tolerance.max_ranks is {most}, and the run has {ranks} ranks",
            f"-np {most}, or --set fault_tolerance.max_ranks={ranks}",
        )
    require_span(recipe, ranks)
    if recipe.data.name == "imagenet":
        shard_folder(recipe)


def shard_folder(recipe: Recipe) -> Path:
    """The folder of shards of a recipe on imagenet.

    Raises:
        HpctrainError: the recipe does not say.
    """
    if not recipe.data.path:
        raise HpctrainError(
            f"recipe {recipe.name} needs data.path, the folder of ImageNet's shards",
            "--set data.path=DIR; hpctrain data shard SOURCE DIR makes it, hpctrain data fake a small one to try with",
        )
    return Path(recipe.data.path).expanduser()
