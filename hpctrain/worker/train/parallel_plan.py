"""How the networks of recipes are divided over a mesh."""

from __future__ import annotations

from hpctrain.common.recipes.schema import Recipe
from hpctrain.worker.adapters.torch.parallel import ParallelPlan

# The classes of modules whose parameters are gathered together, and whose activations are computed again.
_BLOCKS = {"gpt": ["Block"], "resnet18": ["Basic"], "resnet50": ["Bottleneck"], "resnet101": ["Bottleneck"]}


def parallel_plan(recipe: Recipe) -> ParallelPlan:
    """The plan for a recipe's network."""
    blocks = _BLOCKS.get(recipe.model.name, [])
    tensor = {}
    if recipe.model.name == "gpt":
        from hpctrain.worker.models.torch_gpt import tensor_plan

        tensor = tensor_plan()
    return ParallelPlan(
        shard=blocks,
        tensor=tensor,
        recompute=blocks if recipe.sharding.recompute else (),
        zero=recipe.sharding.zero,
    )
