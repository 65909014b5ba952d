"""A recipe's mesh: what its batch is on the data-parallel ranks, and what does not go together with it."""

from __future__ import annotations

from typing import get_args

import pytest

from hpctrain.common.recipes.families import FAMILIES, ModelName
from hpctrain.common.recipes.load import load_recipe
from hpctrain.common.recipes.mesh import AXES, Mesh, Pipeline
from hpctrain.common.recipes.requirements import require_recipe
from hpctrain.common.recipes.schema import Recipe
from support.refusals import refused


def digits(*overrides: str) -> Recipe:
    return load_recipe("digits", overrides)


def test_every_model_says_along_which_axes_it_can_be_divided():
    assert {name for family in FAMILIES for name in family.networks} == set(get_args(ModelName))
    assert {axis for family in FAMILIES for axis in family.axes} <= set(AXES) - {"dp_replicate", "dp_shard"}


def test_the_samples_are_those_of_data_parallel_ranks():
    each = digits("batch.size=null", "batch.per_rank=8")
    assert each.at(8).global_batch == 64
    assert digits("batch.size=null", "batch.per_rank=8", "mesh.dp_shard=4").at(8).global_batch == 64
    # Of 2 x 2 x 2 ranks four have samples of their own. No model of today's has tp, so that no file could say so.
    divided = each.model_copy(update={"mesh": Mesh(dp_shard=2, tp=2)})
    assert divided.at(8).global_batch == 32
    assert divided.at(8).mesh == divided.mesh
    assert divided.at_data_ranks(3).global_batch == 24


@pytest.mark.parametrize(
    ("overrides", "code", "values"),
    [
        (["mesh.tp=2"], "HT-keys-not-together", "mesh.tp: digits_cnn"),
        (["mesh.pp=-1"], "HT-keys-not-together", "mesh.pp: digits_cnn"),
        (["model.name=resnet50", "mesh.cp=2"], "HT-keys-not-together", "mesh.cp: resnet50"),
        (["sharding.recompute=true", "mesh.dp_shard=2"], "HT-keys-not-together", "recompute: digits_cnn"),
        (["sharding.zero=2"], "HT-keys-not-together", "sharding.zero: 2"),
        (["sharding.zero=0", "mesh.dp_shard=2"], "HT-file-value", {"key": "sharding.zero", "value": "0"}),
        (["pipeline.micro_batches=4"], "HT-keys-not-together", "micro_batches: 4"),
        (["pipeline.schedule=gpipe"], "HT-keys-not-together", "schedule: gpipe"),
        (
            ["mesh.dp_shard=2", "fault_tolerance.lost_rank=shrink"],
            "HT-keys-not-together",
            "shrink with mesh dp_shard 2",
        ),
        (
            ["mesh.dp_replicate=2", "fault_tolerance.lost_rank=shrink"],
            "HT-keys-not-together",
            "mesh.dp_replicate fixes it",
        ),
        (
            ["mesh.dp_shard=2", "communication.compression=bf16"],
            "HT-keys-not-together",
            "compression: bf16",
        ),
        (["mesh.dp_shard=0"], "HT-keys-not-together", {"key": "mesh"}),
    ],
)
def test_what_does_not_go_together(overrides: list[str], code: str, values: dict[str, object] | str):
    words, named = ([values], {"key": "the recipe"}) if isinstance(values, str) else ([], values)
    with refused(code, *words, **named):
        digits(*overrides)


@pytest.mark.parametrize(
    ("pipeline", "fault"),
    [
        (Pipeline(micro_batches=3), "3 micro-batches of equal size cannot be made from the 16 samples that each of 4 "),
        (Pipeline(micro_batches=1), "as many micro-batches as stages (2), and there are 1"),
        (Pipeline(schedule="interleaved_1f1b", micro_batches=16), None),
        (Pipeline(schedule="gpipe", micro_batches=1), None),
        (Pipeline(), None),
    ],
)
def test_micro_batches_that_a_schedule_cannot_have(pipeline: Pipeline, fault: str | None):
    recipe = digits().model_copy(update={"mesh": Mesh(pp=2, dp_shard=-1), "pipeline": pipeline})
    if fault is None:
        require_recipe(recipe.at(8), 8)
        return
    with refused("HT-pipeline-wrong-micro-batches", fault):
        require_recipe(recipe.at(8), 8)


def test_interleaved_schedules_go_in_rounds():
    # torch.distributed.pipelining: 5 micro-batches on 2 ranks are 2 rounds, which do not divide them.
    pipeline = Pipeline(schedule="interleaved_1f1b", micro_batches=5)
    recipe = digits("batch.size=20").model_copy(update={"mesh": Mesh(pp=2), "pipeline": pipeline})
    with refused("HT-pipeline-wrong-micro-batches", "in 2 rounds of 2 stages, which do not divide 5 ") as caught:
        require_recipe(recipe.at(2), 2)
    assert caught.value.hint == "--set pipeline.micro_batches=4"
