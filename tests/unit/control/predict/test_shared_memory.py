"""The memory of ranks that share a GPU."""

from __future__ import annotations

from typing import Any

from hpctrain.common.recipes.load import load_recipe, override_recipe
from hpctrain.common.recipes.schema import Recipe
from hpctrain.common.run.plan import Plan, Start
from hpctrain.control.predict.memory import MemorySettings, memory
from hpctrain.control.predict.micro_batch import shared_memory_warning
from hpctrain.control.predict.training import recipe_training
from hpctrain.control.predict.transformers.layout import Layout
from hpctrain.control.predict.transformers.rank_memory import memory as transformer_memory


def plan(recipe: Recipe, ranks: int, **fields: Any) -> Plan:
    return Plan(recipe=recipe.at(ranks), framework="torch", ranks=ranks, threads_per_rank=1, **fields)


def test_ranks_that_share_a_gpu_share_its_memory() -> None:
    recipe = load_recipe("goyal2017", ["data.path=/data"])
    asked = plan(recipe, 4, start=Start(share_gpus=True))
    training = recipe_training(recipe)
    one = memory(training.largest, batch=32, settings=MemorySettings(optimizer=training.optimizer)).used
    assert shared_memory_warning(asked, int(4 * one) + 1, 1) is None
    assert shared_memory_warning(asked, int(2 * one) + 1, 2) is None
    said = shared_memory_warning(asked, int(4 * one) - 1, 1)
    assert said and "batch.micro_batch=N" in said
    assert shared_memory_warning(asked, int(2 * one) - 1, 2)
    # Divided by its mesh, a language model's ranks take less together than copies of it.
    gpt = load_recipe("gpt2-124m", ["data.path=/data"])
    copies = transformer_memory(gpt.model.transformer, Layout.of_recipe(gpt, 4)).used
    divided = plan(override_recipe(gpt, ["mesh.dp_shard=4"]), 4)
    assert shared_memory_warning(plan(gpt, 4), int(4 * copies) - 1, 1)
    assert shared_memory_warning(plan(gpt, 4), int(4 * copies) + 1, 1) is None
    assert shared_memory_warning(divided, int(4 * copies) - 1, 1) is None
