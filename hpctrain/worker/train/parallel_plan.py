"""How the networks of recipes and benchmarks are divided over a mesh."""

from __future__ import annotations

from typing import Literal

from hpctrain.common.recipes.schema import Recipe
from hpctrain.worker.adapters.torch.parallel import ParallelPlan

# The classes of modules whose parameters are gathered together, and whose activations are computed again.
_BLOCKS = {
    "gpt": ["Block"],
    "transformer": ["TransformerEncoderLayer"],
    "resnet18": ["Basic"],
    "resnet50": ["Bottleneck"],
    "resnet101": ["Bottleneck"],
}


def blocks_of(model: str) -> list[str]:
    """The classes of a network's repeated modules, by its name in recipes and benchmarks."""
    return _BLOCKS.get(model, [])


def plan_of(model: str, *, zero: Literal[1, 2, 3] = 3, recompute: bool = False) -> ParallelPlan:
    """The plan for a network, by its name in recipes and benchmarks."""
    blocks = blocks_of(model)
    tensor = {}
    if model == "gpt":
        from hpctrain.worker.models.torch_gpt import tensor_plan

        tensor = tensor_plan()
    return ParallelPlan(shard=blocks, tensor=tensor, recompute=blocks if recompute else (), zero=zero)


def parallel_plan(recipe: Recipe) -> ParallelPlan:
    """The plan for a recipe's network."""
    return plan_of(recipe.model.name, zero=recipe.sharding.zero, recompute=recipe.sharding.recompute)
