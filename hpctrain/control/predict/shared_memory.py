"""The memory of ranks that share a GPU, for a run whose number of ranks is known."""

from __future__ import annotations

from hpctrain.common.errors import HpctrainError
from hpctrain.common.recipes.requirements import require_recipe
from hpctrain.common.recipes.schema import Recipe
from hpctrain.common.run.plan import Plan
from hpctrain.control.predict.layer_memory import largest_batch, memory
from hpctrain.control.predict.micro_batch import memory_settings
from hpctrain.control.predict.training import recipe_training
from hpctrain.control.predict.transformers.layout import Layout
from hpctrain.control.predict.transformers.rank_memory import memory as transformer_memory


def shared_memory_warning(plan: Plan, device_bytes: int, gpus: int) -> str | None:
    """A sentence if the ranks that share a GPU have no room in it together.

    None where they have, and where the memory of a rank cannot be predicted or is still to be divided.

    Args:
        device_bytes: the memory of one GPU.
        gpus: the host's, which its ranks share.
    """
    if plan.recipe is None or plan.recipe.batch.micro_batch == "auto":
        return None
    each = -(-plan.ranks // gpus)
    taken, remedy = _rank_bytes(plan.recipe, plan.ranks, device_bytes / each)
    if each * taken <= device_bytes:
        return None
    return (
        f"{each} ranks share a GPU of {device_bytes / 1e9:.3g} GB and take about {each * taken / 1e9:.3g} GB of it: "
        f"{remedy}"
    )


def _rank_bytes(recipe: Recipe, ranks: int, room: float) -> tuple[float, str]:
    """The memory of a rank, and what to do where there is room for less; 0 where it cannot be predicted."""
    if recipe.model.name == "gpt":
        needed = transformer_memory(recipe.model.transformer, Layout.of_recipe(recipe, ranks))
        return needed.used, "a smaller batch.micro_batch, sharding.recompute, or fewer ranks"
    try:
        training = recipe_training(recipe)
    except HpctrainError:
        return 0, ""
    settings = memory_settings(training, ranks)
    try:
        most = largest_batch(training.largest, room, settings)
    except HpctrainError:
        most = 0
    size = _micro_batch(recipe, ranks, most)
    taken = memory(training.largest, batch=recipe.batch.at_once(ranks), settings=settings).total
    return taken, f"--set batch.micro_batch={size} cuts a rank's samples" if size else "start fewer ranks"


def _micro_batch(recipe: Recipe, ranks: int, most: int) -> int | None:
    """One that the recipe can have: the largest that cuts a rank's share into parts of one size; where that would be
    less than half of what there is memory for, all of it goes before.
    """
    data_ranks = recipe.mesh.at(ranks).data_ranks
    share = recipe.at(ranks).global_batch // data_ranks
    if recipe.mesh.at(ranks).pp > 1:
        return None
    equal = [size for size in range(min(most, share), 0, -1) if share % size == 0]
    large = [size for size in equal if 2 * size >= most]
    for size in [*large, *filter(None, [most]), *equal[len(large) :]]:
        try:
            require_recipe(recipe.computing(size).at(ranks), ranks)
        except HpctrainError:
            continue
        return size
    return None
