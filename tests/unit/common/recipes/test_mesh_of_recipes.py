"""A recipe's mesh: what its batch is on the data-parallel ranks, and what does not go together with it."""

from __future__ import annotations

from typing import get_args

import pytest

from hpctrain.common.errors import HpctrainError
from hpctrain.common.recipes.compatibility import MODEL_AXES, used_values
from hpctrain.common.recipes.difference import deciding_differences
from hpctrain.common.recipes.load import load_recipe
from hpctrain.common.recipes.mesh import AXES, Mesh, Pipeline
from hpctrain.common.recipes.requirements import require_recipe
from hpctrain.common.recipes.schema import ModelSettings, Recipe


def digits(*overrides: str) -> Recipe:
    return load_recipe("digits", overrides)


def test_every_model_says_along_which_axes_it_can_be_divided():
    assert set(MODEL_AXES) == set(get_args(ModelSettings.model_fields["name"].annotation))
    assert {axis for axes in MODEL_AXES.values() for axis in axes} <= set(AXES) - {"dp_replicate", "dp_shard"}


def test_without_a_word_all_ranks_replicate():
    assert digits().mesh == Mesh()
    assert digits().mesh.at(6).sizes == {"dp_replicate": 6, "dp_shard": 1, "pp": 1, "cp": 1, "tp": 1}


def test_the_samples_are_those_of_data_parallel_ranks():
    each = digits("batch.size=null", "batch.per_rank=8")
    assert each.at(8).global_batch == 64
    assert digits("batch.size=null", "batch.per_rank=8", "mesh.dp_shard=4").at(8).global_batch == 64
    # Of 2 x 2 x 2 ranks four have samples of their own. No model of today's has tp, so that no file could say so.
    divided = each.model_copy(update={"mesh": Mesh(dp_shard=2, tp=2)})
    assert divided.at(8).global_batch == 32
    assert divided.at(8).mesh == divided.mesh
    assert divided.at_data_ranks(3).global_batch == 24


def test_shared_statistics_are_over_data_parallel_ranks():
    images = ("model.name=resnet18", "batch.size=16", "batch.drop_last=true", "model.batch_norm.span=8")
    whole = digits(*images)
    require_recipe(whole.at(4), 4)
    divided = whole.model_copy(update={"mesh": Mesh(tp=2)})
    require_recipe(divided.at(8), 8)
    with pytest.raises(HpctrainError, match="over 16 ranks"):
        require_recipe(digits(*images, "batch.size=24").at(16), 16)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["mesh.tp=2"], "mesh.tp: digits_cnn has no plan by which its layers are divided; --mesh tp=1,dp_shard=-1"),
        (["mesh.pp=-1"], "mesh.pp: digits_cnn has no blocks to make stages of"),
        (["model.name=resnet50", "mesh.cp=2"], "mesh.cp: resnet50 has no attention that divides sequences"),
        (["sharding.recompute=true", "mesh.dp_shard=2"], "sharding.recompute: digits_cnn has no blocks"),
        (["sharding.zero=2"], "sharding.zero: 2 is for a mesh with dp_shard; for example --mesh dp_shard=-1"),
        (["sharding.zero=0", "mesh.dp_shard=2"], "sharding.zero: input should be 1, 2 or 3"),
        (["pipeline.micro_batches=4"], "pipeline.micro_batches: 4 is for a mesh with pp; for example --mesh pp=2"),
        (["pipeline.schedule=zbv"], "pipeline.schedule: zbv is for a mesh with pp"),
        (["pipeline.schedule=2f2b"], "pipeline.schedule: input should be 'gpipe', '1f1b'"),
        (["mesh.dp_shard=2", "fault_tolerance=shrink"], "fault_tolerance: shrink with mesh dp_shard 2: a lost rank"),
        (["mesh.dp_shard=-1", "fault_tolerance=elastic"], "fault_tolerance.grow with mesh dp_shard -1"),
        (["mesh.dp_replicate=2", "fault_tolerance=shrink"], "mesh.dp_replicate fixes it; --mesh dp_replicate=-1"),
        (["mesh.dp_shard=2", "communication.compression=bf16"], "--set communication.compression=none"),
        (["mesh.dp_shard=2", "communication.compression=top_k"], "communication.compression: top_k is for gradients"),
        (["mesh.shard=2"], "unknown key 'shard'\n  did you mean 'dp_shard'?"),
        (["mesh.dp_shard=0"], "dp_shard is 0"),
        (["mesh.dp_shard=two"], "dp_shard: input should be a valid integer"),
    ],
)
def test_what_does_not_go_together(overrides: list[str], message: str):
    with pytest.raises(HpctrainError) as caught:
        digits(*overrides)
    assert message in str(caught.value)


def test_a_replicating_mesh_changes_nothing_else():
    for more in ("fault_tolerance=shrink", "fault_tolerance=elastic", "communication.compression=bf16"):
        assert digits("mesh.dp_replicate=-1", more).mesh.replicates_only


def test_ranks_that_the_mesh_does_not_divide():
    recipe = digits("mesh.dp_shard=2")
    with pytest.raises(HpctrainError, match="the mesh dp_shard 2 = 2 does not divide 3 ranks"):
        recipe.at(3)
    with pytest.raises(HpctrainError, match="does not divide 3 ranks"):
        require_recipe(recipe.at(4), 3)


@pytest.mark.parametrize(
    ("pipeline", "message"),
    [
        (
            Pipeline(micro_batches=3),
            r"3 micro-batches of equal size cannot be made from the 16 samples that each of 4 data-",
        ),
        (Pipeline(micro_batches=1), r"1f1b needs as many micro-batches as stages \(2\), and there are 1"),
        (Pipeline(schedule="interleaved_1f1b", micro_batches=16), None),
        (Pipeline(schedule="gpipe", micro_batches=1), None),
        (Pipeline(), None),
    ],
)
def test_micro_batches_that_a_schedule_cannot_have(pipeline: Pipeline, message: str | None):
    recipe = digits().model_copy(update={"mesh": Mesh(pp=2, dp_shard=-1), "pipeline": pipeline})
    if message is None:
        require_recipe(recipe.at(8), 8)
        return
    with pytest.raises(HpctrainError, match=message):
        require_recipe(recipe.at(8), 8)


def test_interleaved_schedules_go_in_rounds():
    # torch.distributed.pipelining: 5 micro-batches on 2 ranks are 2 rounds, which do not divide them.
    pipeline = Pipeline(schedule="interleaved_1f1b", micro_batches=5)
    recipe = digits("batch.size=20").model_copy(update={"mesh": Mesh(pp=2), "pipeline": pipeline})
    with pytest.raises(HpctrainError, match="runs in 2 rounds of 2 stages, which do not divide 5") as caught:
        require_recipe(recipe.at(2), 2)
    assert caught.value.hint == "--set pipeline.micro_batches=4"


def test_no_result_depends_on_how_ranks_are_divided():
    assert deciding_differences(digits(), digits("mesh.dp_shard=2", "sharding.zero=1")) == []


def test_what_a_mesh_makes_of_no_use_is_not_shown():
    assert not {"sharding", "pipeline"} & used_values(digits()).keys()
    shown = used_values(digits("mesh.dp_shard=2"))
    assert shown["sharding"] == {"zero": 3, "recompute": False}
    assert "pipeline" not in shown
