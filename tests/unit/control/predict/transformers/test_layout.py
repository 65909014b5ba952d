"""Layouts of a training, and those that do not fit a transformer."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hpctrain.common.recipes.load import load_recipe
from hpctrain.control.predict.transformers.layout import Layout, check_layout, divided_layers
from hpctrain.control.predict.transformers.model_sizes import named
from support.meshes import mesh
from support.refusals import refused

LLAMA = named("llama3-8b")


@pytest.mark.parametrize(
    ("settings", "code", "values"),
    [
        ({"schedule": "2f2b"}, "HT-choice-unknown", {"key": "schedule"}),
        ({"zero": 4}, "HT-choice-unknown", {"key": "zero", "value": 4}),
        ({"asynchronous_tp": True}, "HT-keys-not-together", {}),
        ({"mesh": mesh(dp_shard=4), "zero": 0}, "HT-keys-not-together", {}),
        ({"deepspeed_pipeline": True}, "HT-keys-not-together", {}),
        ({"deepspeed_pipeline": True, "zero": 1, "schedule": "gpipe"}, "HT-keys-not-together", {}),
        ({"deepspeed_pipeline": True, "zero": 1, "chunked_loss": True}, "HT-keys-not-together", {}),
        ({"virtual_stages": 2}, "HT-keys-not-together", {}),
        ({"mesh": mesh(pp=4), "virtual_stages": 2}, "HT-keys-not-together", {}),
        ({"mesh": mesh(pp=4), "schedule": "interleaved_1f1b"}, "HT-keys-not-together", {}),
    ],
)
def test_values_that_are_invalid_by_themselves_are_refused(settings, code, values):
    with refused(code, **values):
        Layout(**settings)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"mesh": mesh(tp=3)}, "tp 3 does not divide heads (32)"),
        ({"mesh": mesh(cp=3)}, "cp 3 does not divide sequence (8192)"),
        ({"mesh": mesh(pp=64)}, "64 stages of 32 layers"),
        (
            {"mesh": mesh(pp=4), "schedule": "interleaved_1f1b", "virtual_stages": 2, "micro_batches": 9},
            "9 micro-batches are not 2 equal rounds",
        ),
    ],
)
def test_layouts_that_do_not_fit_the_transformer_are_refused(settings, said):
    with refused("HT-layout-not-possible") as wrong:
        check_layout(Layout(**settings), LLAMA)
    assert said in wrong.value.message


def test_heads_of_keys_have_to_fit():
    few = replace(LLAMA, heads=24, kv_heads=6, width=24 * 128, mlp=1024 * 12)
    check_layout(Layout(mesh=mesh(tp=12)), few)
    with refused("HT-layout-not-possible"):
        check_layout(Layout(mesh=mesh(tp=4)), few)


def test_a_batch_is_cut_into_micro_batches():
    found = Layout.of_batch(LLAMA, 256, mesh=mesh(dp_shard=8, tp=4), micro_batch=2)
    assert (found.micro_batches, found.global_batch, found.ranks) == (16, 256, 32)
    with refused("HT-layout-batch-not-divisible", global_batch=260, data_ranks=8, micro_batch=2):
        Layout.of_batch(LLAMA, 260, mesh=mesh(dp_shard=8), micro_batch=2)


@pytest.mark.parametrize(
    ("layers", "stages", "expected"),
    [
        (32, 4, [8, 8, 8, 8]),
        # As Megatron-LM places the 126 layers of Llama 3.1 405B.
        (126, 8, [15, 16, 16, 16, 16, 16, 16, 15]),
        (32, 5, [6, 7, 7, 6, 6]),
    ],
)
def test_layers_are_divided_over_stages(layers, stages, expected):
    assert list(divided_layers(layers, stages)) == expected
    # Ranks have each so many-th stage.
    looped = (
        Layout(mesh=mesh(pp=stages // 2), schedule="interleaved_1f1b", virtual_stages=2) if stages % 2 == 0 else None
    )
    if looped:
        ranks = [looped.rank_layers(replace(LLAMA, layers=layers), rank) for rank in range(stages // 2)]
        assert ranks == [expected[rank] + expected[rank + stages // 2] for rank in range(stages // 2)]


def test_the_layout_of_a_recipe():
    recipe = load_recipe("gpt2-124m", ["mesh.pp=4", "pipeline.schedule=interleaved_1f1b", "sharding.recompute=true"])
    found = Layout.of_recipe(recipe, 8)
    assert (found.mesh.dp_replicate, found.sizes["pp"], found.virtual_stages, found.zero) == (2, 4, 2, 0)
    assert found.recomputation == "full"
    assert found.global_batch == recipe.at_data_ranks(2).global_batch
    sharded = Layout.of_recipe(load_recipe("gpt2-124m", ["mesh.dp_shard=8"]), 8)
    assert (sharded.zero, sharded.reshard, sharded.shards) == (3, True, 8)


@pytest.mark.parametrize(
    ("overrides", "ranks", "at_once", "parts", "batch"),
    [
        ([], 7, 12, 6, 480),
        (["batch.micro_batch=7"], 8, 7, 9, 480),
        (["batch.size=1"], 8, 1, 1, 1),
        ([], 1024, 1, 1, 480),
    ],
)
def test_a_batch_that_ranks_share_unevenly_is_the_recipes(overrides, ranks, at_once, parts, batch):
    found = Layout.of_recipe(load_recipe("gpt2-124m", overrides), ranks)
    assert (found.micro_batch, found.micro_batches, found.global_batch) == (at_once, parts, batch)


def test_sequences_are_checked():
    with refused("HT-layout-not-possible"):
        check_layout(Layout(), named("gpt2"), sequence=1025)
    check_layout(Layout(), LLAMA, sequence=100_000)
    with refused("HT-layout-not-possible"):
        Layout.of_batch(LLAMA, 4, mesh=mesh(cp=4), sequence=8190)
