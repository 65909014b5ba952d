"""The memory of ranks that share a GPU, for a run whose number of ranks is known."""

from __future__ import annotations

from hpctrain.common.errors import HpctrainError
from hpctrain.common.recipes.requirements import require_recipe
from hpctrain.common.recipes.schema import Recipe
from hpctrain.common.run.plan import Plan
from hpctrain.control.predict.layer_memory import largest_batch
from hpctrain.control.predict.micro_batch import memory_settings, rank_bytes
from hpctrain.control.predict.training import recipe_training


def shared_memory_warning(plan: Plan, device_bytes: int, gpus: int) -> str | None:
    """A sentence if the ranks that share a GPU have no room in it together.

    None where they have, and where the memory of a rank cannot be predicted or is still to be divided.

    Args:
        device_bytes: the memory of one GPU.
        gpus: the host's, which its ranks share.
    """
    if plan.recipe is None or plan.recipe.batch.micro_batch == "auto":
        return None
    try:
        taken = rank_bytes(plan.recipe, plan.ranks)
    except HpctrainError:
        return None
    each = -(-plan.ranks // gpus)
    if each * taken <= device_bytes:
        return None
    return (
        f"{each} ranks share a GPU of {device_bytes / 1e9:.3g} GB and take about {each * taken / 1e9:.3g} GB of it: "
        f"{_remedy(plan.recipe, plan.ranks, device_bytes / each)}"
    )


def _remedy(recipe: Recipe, ranks: int, room: float) -> str:
    """What to do where a rank has less memory than it takes."""
    if recipe.model.family.predicts_tokens:
        return "a smaller batch.micro_batch, sharding.recompute, or fewer ranks"
    training = recipe_training(recipe)
    try:
        most = largest_batch(training.largest, room, memory_settings(training, ranks))
    except HpctrainError:
        most = 0
    size = _micro_batch(recipe, ranks, most)
    return f"--set batch.micro_batch={size} cuts a rank's samples" if size else "start fewer ranks"


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
