"""The search for the best mesh of a transformer, and the predictions made of it."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from hpctrain.common.cluster.gpu_models import gpu
from hpctrain.common.recipes.load import load_recipe
from hpctrain.common.recipes.mesh import AXES, Mesh
from hpctrain.control.predict.network import Hardware, stated_network
from hpctrain.control.predict.prediction import Node
from hpctrain.control.predict.prediction_request import PredictionRequest, predict, predict_request, training_of
from hpctrain.control.predict.transformers.language_training import (
    LanguageTraining,
    _usual_batch,
    parse_settings,
    recipe_language_training,
)
from hpctrain.control.predict.transformers.layout import Layout, check_layout
from hpctrain.control.predict.transformers.model_sizes import named, parse
from hpctrain.control.predict.transformers.rank_memory import memory
from hpctrain.control.predict.transformers.rates import System
from hpctrain.control.predict.transformers.search import Search
from hpctrain.control.predict.transformers.step import Setup
from support.refusals import refused

SMALL = parse("layers=8,width=512,heads=8,vocabulary=32000,context=1024")
H100 = System.of("h100-sxm", gpus_per_node=8, network_bytes_per_s=25e9)
NODE = Node(gpu="h100-sxm", local=8, engine="nccl")


def search(network, ranks, batch, *, memory_bytes=80e9, system=H100, sequence=None, **base):
    return Search(
        network=network,
        system=system,
        ranks=ranks,
        global_batch=batch,
        memory_bytes=memory_bytes,
        base=base,
        sequence=sequence,
    ).fitting()


def networks(*counts):
    return [stated_network(count, adapters=8, bytes_per_s=50e9) for count in counts]


def test_all_found_fit_ranks_batch_and_memory_and_the_fastest_is_first():
    found = search(named("llama3-8b"), 16, 64)
    assert len(found) > 50
    for each in found:
        assert each.layout.ranks == 16
        assert each.layout.global_batch == 64
        assert each.memory.fits(80e9) and not each.memory.fits(each.memory.used)
        assert each.layout.ranks == 16
        check_layout(each.layout, named("llama3-8b"))
    seconds = [each.step.seconds for each in found]
    assert seconds == sorted(seconds)


def test_a_search_finds_what_trying_all_would():
    network, best = SMALL, None
    for tp, pp, size in itertools.product((1, 2, 4, 8), (1, 2, 4, 8), (1, 2, 4, 8, 16, 32, 64)):
        data = 8 // tp // pp
        if tp * pp * data != 8 or 64 % (data * size) or (pp > 1 and 64 // data // size < pp):
            continue
        layout = Layout(
            mesh=Mesh(tp=tp, pp=pp, dp_shard=data).at(8),
            micro_batch=size,
            micro_batches=64 // data // size,
            zero=1 if data > 1 else 0,
            sequence_parallel=tp > 1,
        )
        seconds = Setup(network, layout, H100, "pytorch").step.seconds
        if memory(network, layout).fits(80e9) and (best is None or seconds < best):
            best = seconds
    assert best is not None
    assert search(network, 8, 64)[0].step.seconds <= best


def test_what_is_given_is_kept():
    found = search(SMALL, 8, 64, micro_batch=2, recomputation="full", schedule="1f1b", zero=1)
    assert found
    assert {(each.layout.micro_batch, each.layout.recomputation) for each in found} == {(2, "full")}
    assert {each.layout.schedule for each in found} == {"1f1b"}


def test_nothing_fits_or_keys_exclude_each_other():
    with refused("HT-memory-exceeded", ranks=8, gpu="h100-sxm"):
        search(named("llama3.1-405b"), 8, 64)
    with refused("HT-search-nothing-divides", ranks=11, batch=64):
        search(parse("layers=7,width=512,heads=4,vocabulary=1000,context=64"), 11, 64)
    with refused("HT-keys-not-together"):
        search(SMALL, 8, 64, deepspeed_pipeline=True, zero=3)


def llama(mesh, **more):
    settings = {"batch": 256, **more}
    return LanguageTraining(name="llama3-8b", network=named("llama3-8b"), settings=settings, mesh=mesh)


def test_the_rows_of_a_given_mesh():
    found = predict(llama(Mesh(dp_shard=-1)), NODE, networks(1, 4))
    one, four = found.rows
    assert (one.gpus, four.gpus) == (8, 32)
    assert one.efficiency.value == 1 > four.efficiency.value > 0.8
    assert four.tokens_per_s.value == pytest.approx(8192 * 256 / four.step_s.value)
    assert four.samples_per_s.value * four.step_s.value == pytest.approx(256)
    assert sum(four.step_terms.values()) == pytest.approx(four.step_s.value)
    assert four.layout["dp_shard"] == 32 and four.layout["global_batch"] == 256
    assert one.step_terms[one.limited_by] == max(one.step_terms.values())
    assert one.minutes is None and one.kwh is None and one.joules_per_sample is not None
    assert not found.candidates
    assert sum(cause.share for cause in found.causes) == pytest.approx(1)
    assert {cause.name for cause in found.causes} <= {*found.constants}


def test_the_largest_micro_batch_fits_and_one_more_does_not():
    (row,) = predict(llama(Mesh(dp_shard=-1)), NODE, networks(4)).rows
    layout = llama(Mesh(dp_shard=-1)).layout(32)
    most = row.largest_batch
    held = [memory(named("llama3-8b"), replace(layout, micro_batch=size)) for size in (most, most + 1)]
    assert [each.fits(gpu("h100-sxm").memory_bytes) for each in held] == [True, False]


def test_a_mesh_larger_than_a_node_is_measured_against_the_fewest_nodes():
    found = predict(llama(Mesh(tp=8, pp=4)), NODE, networks(4, 8))
    assert found.rows[0].efficiency.value == 1


def test_the_best_mesh_for_each_number_of_nodes():
    found = predict(llama(None), NODE, networks(1, 2))
    assert len(found.candidates) > 10
    assert found.candidates[0] == found.rows[-1]
    rates = [row.tokens_per_s.value for row in found.candidates]
    assert rates == sorted(rates, reverse=True)
    given = predict(llama(Mesh(dp_shard=-1)), NODE, networks(1)).rows[0]
    assert found.rows[0].tokens_per_s.value >= given.tokens_per_s.value


GPT2 = ("gpt2-124m", ["data.path=/text"])


@pytest.mark.parametrize(
    ("micro_batch", "compile_", "measured"),
    [(12, "off", 267_000), (48, "off", 322_000), (12, "auto", 345_000), (48, "auto", 383_000)],
)
def test_gpt2_on_one_h100_is_what_was_measured(micro_batch, compile_, measured):
    # hpctrain run gpt2-124m, which compiled nothing, and a compiled loop on one H100, PyTorch 2.11, 27 November 2026.
    recipe = load_recipe(GPT2[0], [*GPT2[1], f"batch.micro_batch={micro_batch}", f"compile={compile_}"])
    hardware = Hardware(gpu="h100-sxm", gpus_per_node=1)
    (row,) = predict_request(training_of(recipe), PredictionRequest(hardware=hardware, nodes=[1])).rows
    assert row.at_once == micro_batch
    assert row.tokens_per_s.low < measured < row.tokens_per_s.high


def test_a_recipe_lasts_as_long_as_its_steps():
    recipe = load_recipe(*GPT2)
    (row,) = predict_request(
        training_of(recipe), PredictionRequest(hardware=Hardware(gpu="a100-sxm-40", gpus_per_node=8), nodes=[1])
    ).rows
    assert row.minutes.value == pytest.approx(600_000 * row.step_s.value / 60)
    assert row.epochs.value == 600
    assert row.batch_per_gpu == 60
    # The source says about 4 to 5 days on 8 A100 of 40 GB, for about 2017 lines of eager PyTorch compiled.
    assert 1 < row.minutes.value / 60 / 24 < 6


def test_the_mesh_of_a_recipe_is_taken():
    recipe = load_recipe(GPT2[0], [*GPT2[1], "mesh.tp=2", "mesh.dp_shard=-1"])
    (row,) = predict_request(
        training_of(recipe), PredictionRequest(hardware=Hardware(gpu="h100-sxm", gpus_per_node=8), nodes=[1])
    ).rows
    assert (row.layout["tp"], row.layout["dp_shard"]) == (2, 4)


def test_a_mesh_that_cannot_be_compiled_is_eager():
    recipe = load_recipe(GPT2[0], [*GPT2[1], "mesh.tp=2"])
    layout, software = recipe_language_training(recipe).trained(Layout.of_recipe(recipe, 4))
    assert (layout.kernels, software) == ("eager", "hpctrain")
    recipe = load_recipe(*GPT2)
    layout, software = recipe_language_training(recipe).trained(Layout.of_recipe(recipe, 4))
    assert (layout.kernels, software) == ("fused", "hpctrain-compiled")


@pytest.mark.parametrize("micro_batch", [1, 12, 48, 240])
def test_logits_in_chunks_take_no_more_than_a_chunk(micro_batch):
    recipe = load_recipe(GPT2[0], [*GPT2[1], f"batch.micro_batch={micro_batch}"])
    layout = Layout.of_recipe(recipe, 1)
    chunked = memory(named("gpt2"), layout)
    whole = memory(named("gpt2"), replace(layout, chunked_loss=False))
    rows, classes = micro_batch * recipe.model.context, recipe.model.vocabulary
    # Eight chunks at most, and about 2**27 logits where that is fewer.
    assert rows * classes / 8 <= chunked.tensors["logits"] * rows * classes / whole.tensors["logits"]
    assert chunked.tensors["logits"] <= whole.tensors["logits"] * max(1 / 8 + 256 / rows, 2**27 / rows / classes)


def recipe_overrides(layout):
    """The values of a recipe that a layout stands for."""
    found = [f"mesh.{axis}={layout[axis]}" for axis in AXES if axis != "cp"]
    # A pipeline cuts what a rank computes at once into its micro-batches.
    parts = layout["micro_batches"] if layout["pp"] > 1 else 1
    found += [f"batch.size={layout['global_batch']}", "batch.per_rank=null", "batch.emulated_ranks=null"]
    found += [f"batch.micro_batch={layout['micro_batch'] * parts}"]
    if layout["pp"] > 1:
        found += [f"pipeline.schedule={layout['schedule']}", f"pipeline.micro_batches={parts}"]
    kept = layout["zero"] == 3 and not layout["reshard"] and layout["pp"] == 1
    zero = (2 if kept else max(1, int(layout["zero"]))) if layout["dp_shard"] > 1 else 3
    return [*found, f"sharding.zero={zero}", f"sharding.recompute={str(layout['recomputation'] == 'full').lower()}"]


def test_what_a_recipe_is_searched_for_can_be_run():
    from hpctrain.common.recipes.load import override_recipe
    from hpctrain.common.recipes.requirements import require_recipe

    recipe = load_recipe(GPT2[0], [*GPT2[1], "data.path=null"])
    found = predict(recipe_language_training(recipe, auto=True), NODE, networks(1))
    assert len(found.candidates) > 10
    for row in found.candidates:
        changed = override_recipe(recipe, recipe_overrides(row.layout))
        again = Layout.of_recipe(changed, 8)
        assert (again.micro_batch, again.micro_batches) == (row.layout["micro_batch"], row.layout["micro_batches"])
        assert again.sizes == {axis: row.layout[axis] for axis in again.sizes}
        assert again.recomputation == row.layout["recomputation"]
        with refused("HT-recipe-needs-data-path"):
            require_recipe(changed.at(8), 8)


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("bach=4", "HT-set-unknown-key"),
        ("mesh=tp", "HT-set-unknown-key"),
        ("batch=0", "HT-option-bad-value"),
        ("batch=²", "HT-option-bad-value"),
        ("batch", "HT-option-bad-value"),
        ("zero=4", "HT-choice-unknown"),
        ("state=all", "HT-choice-unknown"),
        ("reshard=yes", "HT-choice-unknown"),
        ("precision=bf17", "HT-choice-unknown"),
    ],
)
def test_settings_that_are_none(text, code):
    with refused(code) as wrong:
        parse_settings([text])
    assert f"--set {text}: " in wrong.value.message


def test_settings():
    found = parse_settings(["batch=64", "zero=1", "reshard=false", "state=bf16", "software=nemo", "prefetch=0"])
    assert found.pop("state").total == 8
    assert found == {"batch": 64, "software": "nemo", "zero": 1, "reshard": False, "prefetch": 0}


def test_what_cannot_be_predicted():
    request = PredictionRequest(hardware=Hardware(gpu="v100-sxm", gpus_per_node=8), nodes=[1])
    with refused("HT-prediction-not-possible", gpu="v100-sxm", precision="bf16"):
        predict_request(llama(Mesh(dp_shard=-1)), request)
    with refused("HT-option-not-usable-here"):
        predict_request(
            llama(Mesh(dp_shard=-1)),
            replace(request, hardware=Hardware(gpu="h100-sxm", gpus_per_node=8), calibration=["sweep.json"]),
        )
    with refused("HT-layout-not-possible"):
        llama(Mesh(tp=3)).layout(6)
    with refused("HT-ranks-not-divisible"):
        llama(Mesh(tp=8)).layout(12)
    with refused("HT-layout-batch-not-divisible", global_batch=256):
        llama(Mesh(dp_shard=-1), micro_batch=3).layout(8)


def predicted(overrides, *, nodes=(1,), gpus=8, auto=False):
    recipe = load_recipe(GPT2[0], [*GPT2[1], *overrides])
    node = replace(NODE, local=gpus)
    return predict(recipe_language_training(recipe, auto=auto), node, networks(*nodes))


@pytest.mark.parametrize(("gpus", "overrides"), [(7, []), (8, ["batch.micro_batch=7"])])
def test_samples_that_ranks_do_not_share_evenly_are_all_counted(gpus, overrides):
    (row,) = predicted(overrides, gpus=gpus).rows
    assert row.layout["global_batch"] == 480
    assert row.samples_per_s.value * row.step_s.value == pytest.approx(480)
    assert row.batch_per_gpu == 480 / gpus


def test_ranks_without_samples_are_warned_of():
    found = predicted([], nodes=(1, 128))
    assert [row.layout["global_batch"] for row in found.rows] == [480, 480]
    assert [warning for warning in found.warnings if warning.startswith("on 128 nodes")]
    assert not [warning for warning in predicted([]).warnings if warning.startswith("on ")]


def test_micro_batches_that_a_run_refuses_are_not_predicted():
    with refused("HT-pipeline-wrong-micro-batches", "8 micro-batches", "12 samples"):
        predicted(["mesh.pp=8"])


def test_an_epoch_without_a_whole_batch_has_no_time():
    with refused("HT-batch-too-large", samples=100, global_batch=480):
        predicted(["data.epoch_samples=100"])


def test_a_batch_of_each_rank_is_searched_and_written_as_one_batch():
    from hpctrain.common.recipes.load import override_recipe

    each = ["batch.size=null", "batch.per_rank=8"]
    recipe = load_recipe(GPT2[0], [*GPT2[1], *each])
    for row in predicted(each, auto=True).candidates:
        assert row.layout["global_batch"] == 64
        assert row.minutes.value == pytest.approx(600 * (480_000 // 64) * row.step_s.value / 60)
        changed = override_recipe(recipe, recipe_overrides(row.layout))
        assert (changed.batch.size, changed.batch.per_rank) == (64, None)


def test_a_schedule_that_a_search_leaves_out_can_be_given():
    cut = [each.layout for each in search(SMALL, 8, 64, schedule="gpipe") if each.layout.sizes["pp"] > 1]
    assert {(layout.schedule, layout.virtual_stages) for layout in cut} == {("gpipe", 1)}


def test_a_search_keeps_the_schedule_of_a_recipe(schedule="interleaved_1f1b"):
    own = ["mesh.pp=2", f"pipeline.schedule={schedule}"]
    cut = [row.layout for row in predicted(own, auto=True).candidates if row.layout["pp"] > 1]
    assert {layout["schedule"] for layout in cut} == {schedule}
    others = [row.layout for row in predicted(["mesh.pp=2"], auto=True).candidates if row.layout["pp"] > 1]
    assert len({layout["schedule"] for layout in others}) > 1


@pytest.mark.parametrize("zero", [1, 3])
def test_equal_layouts_are_found_once(zero):
    layouts = [each.layout for each in search(SMALL, 16, 64, zero=zero)]
    assert len(layouts) == len({*layouts}) > 10
    assert zero == 3 or not any(layout.reshard for layout in layouts)


def test_a_recipe_is_offered_only_meshes_that_it_can_have():
    for row in predicted(["communication.compression=fp16"], auto=True).candidates:
        sizes = {axis: row.layout[axis] for axis in ("dp_replicate", "dp_shard", "pp", "cp", "tp")}
        assert sizes == {"dp_replicate": 8, "dp_shard": 1, "pp": 1, "cp": 1, "tp": 1}


def test_a_search_refuses_sequences_beyond_learned_positions():
    with refused("HT-layout-not-possible"):
        search(SMALL, 8, 64, sequence=2048)


@pytest.mark.parametrize("ranks", [1, 3, 6, 7, 12, 24, 64, 80, 96, 112, 160, 320, 384])
def test_a_batch_that_nobody_stated_can_be_divided_over_all_ranks(ranks):
    batch = _usual_batch(ranks, 512)
    assert batch % ranks == 0 and 384 <= batch <= 640
    assert (batch == 512) == (ranks.bit_count() == 1)
