"""Micro-batches as large as the memory allows: which number a plan has, and where there can be none."""

from __future__ import annotations

import dataclasses
from typing import Any

import pynvml
import pytest

from hpctrain.common.cluster.machine import Machine, available_bytes, this_machine
from hpctrain.common.recipes.load import load_recipe, override_recipe
from hpctrain.common.recipes.smoke import smoke
from hpctrain.common.run.plan import Plan, Slots, Start
from hpctrain.common.run.request import TrainingRequest, unplaced_plan
from hpctrain.control.planning.place_hosts import PlacedHosts
from hpctrain.control.planning.planner import make_plan, place_plan
from hpctrain.control.predict.micro_batch import SHARE, fitting, rank_bytes
from hpctrain.control.predict.network import Hardware
from hpctrain.control.predict.prediction_request import PredictionRequest, predict_request, training_of
from hpctrain.control.resuming.resume import changed_work, resumed_plan
from support.refusals import refused

GPT = load_recipe("gpt2-124m", ["data.path=/data", "batch.micro_batch=auto"])
DIGITS = load_recipe("digits", ["batch.micro_batch=auto"])
GHOST = ["data.path=/data", "model.batch_norm.span=32", "batch.per_rank=4096", "batch.micro_batch=auto"]
BOTH = frozenset({"torch", "keras"})


def machine(gpus: int = 0, *, gpu_bytes: int | None = None, available_bytes: int | None = None) -> Machine:
    return Machine(
        host="n1",
        cores=8,
        frameworks=BOTH,
        versions={"torch": "2.13.0"},
        gpus=gpus,
        gpu_memory=lambda: gpu_bytes,
        available_bytes=available_bytes,
    )


def chosen(plan: Plan) -> int:
    assert plan.recipe is not None and isinstance(plan.recipe.batch.micro_batch, int)
    return plan.recipe.batch.micro_batch


def needed(size: int, ranks: int) -> float:
    """The bytes of a rank, one more against rounding."""
    return rank_bytes(GPT.at(ranks).computing(size), ranks) + 1


def test_the_largest_that_has_room_divides_a_rank_s_share() -> None:
    # 480 samples over 8 ranks are 60 each.
    for size, next_larger in [(1, 2), (12, 15), (30, 60)]:
        room = needed(size, 8) / SHARE
        assert fitting(GPT, 8, room) == size
        assert fitting(GPT, 8, needed(next_larger, 8) / SHARE * 0.999) == size
    assert fitting(GPT, 8, 1e15) == 60
    with refused("HT-memory-exceeded", percent=90.0, needed=(needed(1, 8) - 1) / 1e9):
        fitting(GPT, 8, needed(1, 8))


def test_images_too_where_statistics_are_of_a_fixed_number() -> None:
    recipe = load_recipe("goyal2017", GHOST)
    size = fitting(recipe, 2, 80e9)
    assert 32 < size < 4096 and size % 32 == 0
    assert rank_bytes(recipe.at(2).computing(size), 2) <= SHARE * 80e9 < rank_bytes(recipe.at(2).computing(2 * size), 2)


def test_what_stages_cannot_have_is_left_out() -> None:
    # The micro-batches of a pipeline are equal parts of what a rank computes at once.
    staged = override_recipe(GPT, ["mesh.pp=2", "pipeline.micro_batches=4"])
    assert fitting(override_recipe(staged, ["batch.size=60"]), 2, 1e15) == 60
    assert fitting(override_recipe(staged, ["batch.size=60"]), 2, needed(5, 8)) % 4 == 0
    with refused("HT-pipeline-wrong-micro-batches"):
        fitting(override_recipe(staged, ["batch.size=30"]), 2, 1e15)


@pytest.mark.parametrize(
    ("fields", "ranks", "backend", "start"),
    [
        ({"gpus": 2, "gpu_bytes": 2}, 2, None, {}),
        ({"gpus": 1, "gpu_bytes": 4}, 2, "nccl", {"share_gpus": True}),
        ({"gpus": 2, "gpu_bytes": 2}, 1, None, {}),
        # On CPUs, and over MPI on hosts with GPUs too, ranks divide the host's memory.
        ({"available_bytes": 4}, 2, "gloo", {}),
        ({"gpus": 2, "gpu_bytes": 1000, "available_bytes": 4}, 2, "mpi", {}),
        ({"available_bytes": 2}, 1, None, {}),
    ],
)
def test_the_memory_of_a_rank(fields: dict[str, int], ranks: int, backend: str | None, start: dict[str, Any]) -> None:
    unit = needed(12, ranks) / SHARE / 2
    memory = {name: round(value * unit) + 10 if name.endswith("bytes") else value for name, value in fields.items()}
    asked = TrainingRequest(work=GPT, ranks=ranks, backend=backend, start=Start(**start))
    plan = make_plan(asked, machine(**memory))
    assert chosen(plan) == 12
    assert plan.micro_batch_reason.startswith(f"12 of the {480 // ranks} ")
    assert plan.recipe == GPT.at(ranks).computing(12)


def test_a_host_whose_memory_is_not_known() -> None:
    for found, owners in [(machine(), "hosts"), (machine(1, available_bytes=10**15), "GPUs")]:
        with refused("HT-batch-auto-not-possible", owners=owners):
            make_plan(TrainingRequest(work=GPT), found)
    cpu = PredictionRequest(hardware=Hardware(gpu="cpu", gpus_per_node=1), nodes=[1])
    with refused("HT-batch-auto-not-possible", owners="hosts"):
        predict_request(training_of(DIGITS), cpu)


def test_this_machine_s_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    here = this_machine()
    assert here.available_bytes and here.available_bytes > 2**20
    assert (here.gpu_bytes is None) == (here.gpus == 0)
    assert available_bytes({"SLURM_MEM_PER_NODE": "16"}) == 16 * 2**20
    assert available_bytes({"SLURM_MEM_PER_NODE": "0"}) > 16 * 2**20
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert (
        chosen(make_plan(TrainingRequest(work=smoke(GPT)), dataclasses.replace(this_machine(), frameworks=BOTH))) == 16
    )


def test_a_gpu_that_does_not_tell_its_memory_stops_no_other_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(pynvml, "nvmlInit", lambda: None)
    monkeypatch.setattr(pynvml, "nvmlShutdown", lambda: None)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetCount", lambda: 1)
    # Without NVML's start, it knows no GPU.
    here = dataclasses.replace(this_machine(), frameworks=BOTH, versions={})
    assert (here.gpus, here.gpu_bytes) == (1, None)
    assert make_plan(TrainingRequest(work=GPT.computing(12)), here).micro_batch_reason == ""
    with refused("HT-batch-auto-not-possible", owners="GPUs"):
        make_plan(TrainingRequest(work=GPT), here)


def test_it_is_refused_where_memory_would_decide_the_result_or_is_not_predicted() -> None:
    for span in ("null", "world"):
        with refused("HT-keys-not-together", "resnet50 normalises"):
            load_recipe("goyal2017", [*GHOST, f"model.batch_norm.span={span}"])
    with refused("HT-only-in-pytorch", title="digits"):
        unplaced_plan(TrainingRequest(work=DIGITS, ranks=1, framework="keras"), BOTH)
    divided = override_recipe(DIGITS, ["mesh.dp_shard=2"])
    with refused("HT-prediction-not-possible"):
        make_plan(TrainingRequest(work=divided, ranks=2, backend="gloo"), machine(available_bytes=10**12))


def test_a_job_s_number_is_chosen_in_the_job_and_stays() -> None:
    submitted = unplaced_plan(TrainingRequest(work=GPT, ranks=2), BOTH)
    hosts = PlacedHosts(slots=(Slots(host="n1", slots=2),))
    # The login node only looks where ranks might be.
    login = place_plan(submitted, hosts, machine())
    assert login.recipe and login.recipe.batch.micro_batch == "auto"
    roomy = machine(2, gpu_bytes=round(needed(12, 2) / SHARE) + 1)
    begun, _ = resumed_plan(submitted, TrainingRequest(work=None), roomy)
    assert chosen(begun) == 12
    # Resumed as auto, on fewer ranks with more memory.
    now, changed = changed_work(begun, GPT.at(2))
    assert changed == {} and now.micro_batch_reason == begun.micro_batch_reason
    later, _ = resumed_plan(now, TrainingRequest(work=None, ranks=1), machine(1, gpu_bytes=10**15))
    assert chosen(later) == 12
    with refused("HT-run-other-settings", differences={"batch.micro_batch": (12, 24)}):
        changed_work(begun, GPT.at(2).computing(24))
    other, _ = changed_work(begun, GPT.at(2).computing(24), accept=True)
    assert (chosen(other), other.micro_batch_reason) == (24, "")


def test_predictions_have_the_number_for_their_gpu_and_ranks() -> None:
    # A prediction needs no data.
    recipe = load_recipe("gpt2-124m", ["batch.micro_batch=auto"])
    hardware = Hardware(gpu="h100-sxm", gpus_per_node=8)
    rows = predict_request(training_of(recipe), PredictionRequest(hardware=hardware, nodes=[1, 2])).rows
    sizes = [fitting(recipe, ranks, 80e9) for ranks in (8, 16)]
    assert [row.at_once for row in rows] == sizes == [60, 30]
    ghost = load_recipe("goyal2017", GHOST)
    one = predict_request(training_of(ghost), PredictionRequest(hardware=hardware, nodes=[1])).rows[0]
    assert 32 < one.at_once < 4096 and one.largest_batch and one.at_once <= one.largest_batch
