"""The prediction for one run whose ranks are known."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hpctrain.common.recipes.load import load_recipe, override_recipe
from hpctrain.common.recipes.schema import Recipe
from hpctrain.common.run.plan import HostOptions, Plan, Slots, Start
from hpctrain.control.predict.hardware import Hardware
from hpctrain.control.predict.memory import MemorySettings, memory
from hpctrain.control.predict.request import PredictionRequest, predict_request
from hpctrain.control.predict.run_prediction import plan_hardware, predict_run, shared_memory_warning
from hpctrain.control.predict.training import recipe_training
from hpctrain.control.predict.transformers.layout import Layout
from hpctrain.control.predict.transformers.memory import memory as transformer_memory
from support.refusals import refused

H100 = Hardware(gpu="h100-sxm", gpus_per_node=8)


def plan(recipe: Recipe, ranks: int, **fields: Any) -> Plan:
    return Plan(recipe=recipe.at(ranks), framework="torch", ranks=ranks, threads_per_rank=1, **fields)


def test_it_is_plan_s_prediction_of_the_recipe_not_of_its_batch() -> None:
    # 32 samples a rank on any number of ranks: resolved for 16, one node would compute all 512.
    recipe = load_recipe("goyal2017", ["data.path=/data"])
    found = predict_run(recipe, plan(recipe, 16), H100, 2)
    assert found.prediction == predict_request(recipe_training(recipe), PredictionRequest(hardware=H100, nodes=[2]))
    assert (found.row.gpus, found.at_once, found.epochs) == (16, 32, 90)
    assert found.minutes == found.row.minutes


def test_a_run_trains_on_where_its_result_is_reached() -> None:
    recipe = load_recipe("mlperf-resnet50@8192", ["data.path=/data"])
    found = predict_run(recipe, plan(recipe, 32), H100, 4)
    assert found.row.minutes and found.row.epochs and found.row.epochs.value == 42.5
    assert found.minutes.value == pytest.approx(found.row.minutes.value * 44 / 42.5)
    assert found.minutes.high == pytest.approx(found.row.minutes.high * 44 / 42.5)


@pytest.mark.parametrize(
    ("fields", "changes", "engine"),
    [
        ({}, [], "nccl"),
        ({"backend": "gloo"}, [], "gloo"),
        ({"backend": "single"}, [], "nccl"),
        ({}, ["fault_tolerance=shrink"], "mpi"),
    ],
)
def test_what_reduces_is_the_run_s(fields: dict[str, Any], changes: list[str], engine: str) -> None:
    recipe = load_recipe("digits", changes)
    found = predict_run(recipe, plan(recipe, 8, **fields), H100, 1)
    assert found.prediction.node.engine == engine


@pytest.mark.parametrize(
    ("changes", "remedy"),
    [
        (["batch.per_rank=4096"], "--set batch.micro_batch=512 cuts them"),
        # A prime number has no equal parts but single images.
        (["batch.per_rank=4099"], "--set batch.micro_batch={most} cuts them"),
        # One rank alone cannot normalise over more than it computes at once.
        (["batch.per_rank=4096", "model.batch_norm.span=4096"], "take other GPUs"),
    ],
)
def test_samples_that_have_no_room(changes: list[str], remedy: str) -> None:
    recipe = load_recipe("goyal2017", ["data.path=/data", *changes])
    found = predict_run(recipe, plan(recipe, 1), replace(H100, gpus_per_node=1), 1)
    most = found.row.largest_batch
    assert most and 512 <= most < 1024
    assert found.memory_warning and found.memory_warning.endswith(f" {most}: {remedy.format(most=most)}")


def test_ranks_that_share_a_gpu_share_its_memory() -> None:
    recipe = load_recipe("goyal2017", ["data.path=/data"])
    asked = plan(recipe, 4, start=Start(share_gpus=True))
    with refused("HT-prediction-not-possible"):
        predict_run(recipe, asked, replace(H100, gpus_per_node=4), 1)
    training = recipe_training(recipe)
    one = memory(training.largest, batch=32, settings=MemorySettings(optimizer=training.optimizer)).total
    assert shared_memory_warning(asked, 4 * one, 1) is None
    assert shared_memory_warning(asked, 2 * one, 2) is None
    said = shared_memory_warning(asked, 4 * one - 1, 1)
    assert said and "batch.micro_batch=16" in said
    assert shared_memory_warning(asked, 2 * one - 1, 2)
    # Not even one sample each has room.
    assert shared_memory_warning(asked, one // 2, 1)
    # Divided by its mesh, a language model's ranks take less together than copies of it.
    gpt = load_recipe("gpt2-124m", ["data.path=/data"])
    copies = transformer_memory(gpt.model.transformer, Layout.of_recipe(gpt, 4)).used
    divided = plan(override_recipe(gpt, ["mesh.dp_shard=4"]), 4)
    assert shared_memory_warning(plan(gpt, 4), int(4 * copies) - 1, 1)
    assert shared_memory_warning(plan(gpt, 4), int(4 * copies) + 1, 1) is None
    assert shared_memory_warning(divided, int(4 * copies) - 1, 1) is None


def test_the_nodes_of_a_plan() -> None:
    recipe = load_recipe("digits")
    hosts = tuple(Slots(host=f"n{number}", slots=2) for number in range(3))
    hardware, nodes = plan_hardware(plan(recipe, 6, hosts=hosts), "cpu")
    assert (hardware.gpu, hardware.gpus_per_node, hardware.adapters, nodes) == ("cpu", 2, None, 3)
    uneven = (Slots(host="a", slots=1), Slots(host="b", slots=2))
    with refused("HT-prediction-not-possible"):
        plan_hardware(plan(recipe, 3, hosts=uneven), "cpu")


def test_of_several_topologies_that_of_the_run_s_hosts(tmp_path: Path) -> None:
    fabric = tmp_path / "topology.yaml"
    fabric.write_text(
        """\
- topology: login
  cluster_default: true
  tree: {switches: [{switch: s, nodes: "l[1-2]"}]}
- topology: gpu
  tree: {switches: [{switch: t, nodes: "n[1-4]"}]}
"""
    )
    recipe = load_recipe("digits")
    hosts = tuple(Slots(host=f"n{number}", slots=1) for number in range(1, 5))
    made = plan(recipe, 4, hosts=hosts, host_options=HostOptions(fabric=fabric))
    assert predict_run(recipe, made, *plan_hardware(made, "h100-sxm")).row.gpus == 4
