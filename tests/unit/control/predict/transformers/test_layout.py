"""Layouts of a training, and those that do not fit a transformer."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hpctrain.common.recipes.load import load_recipe
from hpctrain.control.predict.transformers.layout import Layout
from hpctrain.control.predict.transformers.layout_checks import check_layout
from hpctrain.control.predict.transformers.model_sizes import named
from support.meshes import mesh
from support.refusals import refused

LLAMA = named("llama3-8b")


@pytest.mark.parametrize(
    ("settings", "code", "values"),
    [
        ({"schedule": "2f2b"}, "HT-choice-unknown", {"key": "schedule"}),
        ({"zero": 4}, "HT-choice-unknown", {"key": "zero", "value": 4}),
        ({"micro_batch": 0}, "HT-key-out-of-range", {"key": "micro_batch"}),
        ({"prefetch": -1}, "HT-key-out-of-range", {"key": "prefetch", "least": 0}),
        ({"asynchronous_tp": True}, "HT-keys-not-together", {}),
        ({"mesh": mesh(dp_shard=4), "zero": 0}, "HT-keys-not-together", {}),
        ({"deepspeed_pipeline": True}, "HT-keys-not-together", {}),
        ({"deepspeed_pipeline": True, "zero": 1, "schedule": "gpipe"}, "HT-keys-not-together", {}),
        ({"deepspeed_pipeline": True, "zero": 1, "chunked_loss": True}, "HT-keys-not-together", {}),
        ({"virtual_stages": 2}, "HT-layout-stages-of-schedule", {"stages": 2}),
        ({"mesh": mesh(pp=4), "virtual_stages": 2}, "HT-layout-stages-of-schedule", {"schedule": "1f1b"}),
        ({"mesh": mesh(pp=4), "schedule": "zbv"}, "HT-layout-stages-of-schedule", {"schedule": "zbv"}),
        ({"mesh": mesh(pp=4), "schedule": "interleaved_1f1b"}, "HT-layout-stages-of-schedule", {"stages": 1}),
    ],
)
def test_values_that_are_invalid_by_themselves_are_refused(settings, code, values):
    with refused(code, **values):
        Layout(**settings)


@pytest.mark.parametrize(
    ("settings", "code", "values"),
    [
        ({"mesh": mesh(tp=3)}, "HT-layout-not-divisible", {"axis": "tp", "of": "heads", "parts": 32}),
        ({"mesh": mesh(cp=3)}, "HT-layout-not-divisible", {"axis": "cp", "of": "sequence", "parts": 8192}),
        ({"mesh": mesh(pp=64)}, "HT-layout-more-stages-than-layers", {"stages": 64, "layers": 32}),
        (
            {"mesh": mesh(pp=4), "schedule": "interleaved_1f1b", "virtual_stages": 2, "micro_batches": 9},
            "HT-layout-interleaved-micro-batches",
            {"micro_batches": 9, "rounds": 2, "pp": 4},
        ),
    ],
)
def test_layouts_that_do_not_fit_the_transformer_are_refused(settings, code, values):
    with refused(code, **values):
        check_layout(Layout(**settings), LLAMA)


def test_heads_of_keys_have_to_fit():
    few = replace(LLAMA, heads=24, kv_heads=6, width=24 * 128, mlp=1024 * 12)
    check_layout(Layout(mesh=mesh(tp=12)), few)
    with refused("HT-layout-kv-heads", tp=4, heads=6):
        check_layout(Layout(mesh=mesh(tp=4)), few)


def test_a_batch_is_cut_into_micro_batches():
    found = Layout.of_batch(LLAMA, 256, mesh=mesh(dp_shard=8, tp=4), micro_batch=2)
    assert (found.micro_batches, found.global_batch, found.ranks) == (16, 256, 32)
    check_layout(found, LLAMA, global_batch=256)
    with refused("HT-layout-batch-not-divisible", global_batch=250, product=256):
        check_layout(found, LLAMA, global_batch=250)
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
    assert Layout(mesh=mesh(pp=stages)).stage_layers(replace(LLAMA, layers=layers)) == expected


def test_the_stages_of_a_rank():
    looped = Layout(mesh=mesh(pp=4), schedule="interleaved_1f1b", virtual_stages=2)
    assert [looped.own_stages(rank) for rank in range(4)] == [[0, 4], [1, 5], [2, 6], [3, 7]]
    there_and_back = replace(looped, schedule="zbv")
    assert [there_and_back.own_stages(rank) for rank in range(4)] == [[0, 7], [1, 6], [2, 5], [3, 4]]


def test_the_layout_of_a_recipe():
    recipe = load_recipe("gpt2-124m", ["mesh.pp=4", "pipeline.schedule=zbv", "sharding.recompute=true"])
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
    with refused("HT-layout-sequence-too-long", sequence=1025, context=1024):
        check_layout(Layout(), named("gpt2"), sequence=1025)
    check_layout(Layout(), LLAMA, sequence=100_000)
    with refused("HT-layout-not-divisible", axis="cp", of="sequence", parts=8190):
        Layout.of_batch(LLAMA, 4, mesh=mesh(cp=4), sequence=8190)
