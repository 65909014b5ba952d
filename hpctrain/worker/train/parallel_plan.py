"""How the networks of recipes and benchmarks are divided over a mesh."""

from __future__ import annotations

from typing import Literal

from hpctrain.common.recipes.families import network
from hpctrain.common.recipes.schema import Recipe
from hpctrain.worker.adapters.torch.parallel import ParallelPlan

# The encoder of benchmarks, which no recipe has.
_BENCHED = {"transformer": "TransformerEncoderLayer"}


def plan_of(model: str, *, zero: Literal[1, 2, 3] = 3, recompute: bool = False) -> ParallelPlan:
    """The plan for a network, by its name in recipes and benchmarks."""
    block = _BENCHED.get(model) or network(model).block
    blocks = [block] if block else []
    tensor = {}
    if model == "gpt":
        from hpctrain.worker.models.torch_gpt import tensor_plan

        tensor = tensor_plan()
    return ParallelPlan(shard=blocks, tensor=tensor, recompute=blocks if recompute else (), zero=zero)


def parallel_plan(recipe: Recipe) -> ParallelPlan:
    """The plan for a recipe's network."""
    return plan_of(recipe.model.name, zero=recipe.sharding.zero, recompute=recipe.sharding.recompute)
