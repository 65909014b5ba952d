from __future__ import annotations

import json

import numpy as np
import pytest
from pydantic import ValidationError

from hpctrain.common.cluster.gpu_models import GpuModel, gpu_reported_as, gpus
from hpctrain.common.recipes.load import load_recipe
from hpctrain.common.workloads.workload import load_workload
from hpctrain.control.predict.measurements import Calibration, make_sweep, read_calibration
from hpctrain.control.predict.network import Hardware, stated_network
from hpctrain.control.predict.prediction import Node, Site, energy
from hpctrain.control.predict.prediction_request import PredictionRequest, predict, predict_request
from hpctrain.control.predict.training import epochs, recipe_training, script_training, validation_cost
from hpctrain.control.predict.values import Estimate, constants
from hpctrain.report.prediction_table import memory_warnings, prediction_notes, prediction_record
from support.refusals import refused
from support.report.plain_values import plain

GBIT = 1e9 / 8
# Enough workers to decode what a GPU takes.
FED = ("data.workers=64",)


def networks(*counts, adapters=8, gbit=400):
    return [stated_network(count, adapters=adapters, bytes_per_s=gbit * GBIT) for count in counts]


def measured(seconds):
    return {"seconds": seconds, "gpu": None, "ranks": 1, "cores": None}


def of(recipe, *counts, gpu="h100-sxm", overrides=(), **more):
    training = recipe_training(load_recipe(recipe, overrides))
    return predict(training, Node(gpu=gpu, local=8, engine="nccl"), networks(*counts), **more)


def test_every_figure_lies_in_its_range_and_scaling_is_against_one_node():
    found = of("goyal2017", 1, 4, 32, overrides=FED, site=Site(g_per_kwh=100))
    figures = [figure for row in found.rows for figure in vars(row).values() if isinstance(figure, Estimate)]
    assert len(figures) == 3 * 12
    assert all(each.low <= each.value <= each.high for each in figures)
    one, four, many = found.rows
    assert one.efficiency.value == 1
    assert 1 > four.efficiency.value > many.efficiency.value > 0.5
    assert four.samples_per_s.value == pytest.approx(4 * 8 * 32 / four.step_s.value)
    assert (many.nodes, many.gpus, many.batch_per_gpu) == (32, 256, 32)


def test_a_run_lasts_as_long_as_its_steps_and_what_lies_between():
    (row,) = of("goyal2017", 32).rows
    steps = 90 * (1_281_167 // 8192)
    assert row.minutes.value > steps * row.step_s.value / 60
    assert row.minutes.value == pytest.approx(steps * row.step_s.value / 60, rel=0.1)


def test_epochs_to_the_target_are_those_of_the_reference():
    recipe = load_recipe("mlperf-resnet50@8192", []).at(64)
    count, source = epochs(recipe, plain())
    assert count[0] == 42.5
    assert "MLPerf" in source
    own, source = epochs(load_recipe("goyal2017", []).at(256), plain())
    assert (own[0], source) == (90, "the recipe's")


def test_energy_of_idle_and_of_full_gpus():
    values = plain(gpu_power_share=0.7, full_power=1.0)

    def node_w(busy):
        found = energy(
            values,
            Node(gpu="h100-sxm", local=8, engine="nccl"),
            2,
            busy=np.array([busy]),
            seconds=np.array([3600.0]),
            samples_per_s=np.array([100.0]),
            site=Site(pue=1.5, g_per_kwh=100),
        )
        assert found["kwh"][0] == pytest.approx(2 * found["node_w"][0] / 1000)
        assert found["facility_kwh"][0] == pytest.approx(1.5 * found["kwh"][0])
        assert found["kg_co2"][0] == pytest.approx(0.1 * found["facility_kwh"][0])
        assert found["joules_per_sample"][0] == pytest.approx(2 * found["node_w"][0] / 100)
        return found["node_w"][0]

    # GPUs at their limit are 70 % of the node.
    assert node_w(1.0) == pytest.approx(8 * 700 / 0.7)
    assert node_w(0.0) == pytest.approx(8 * 700 / 0.7 - 8 * 700 + 8 * 70)


def test_a_gpu_without_one_of_its_fields_is_refused():
    stated = gpus()["l40s"].model_dump()
    for field in stated:
        with pytest.raises(ValidationError, match=field):
            GpuModel.model_validate({key: value for key, value in stated.items() if key != field})


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(gpus()))
def test_every_gpu_can_be_predicted(name):
    (row,) = of("goyal2017", 1, gpu=name).rows
    assert 1e-3 < row.step_s.value < 1
    assert row.largest_batch >= 32


@pytest.mark.parametrize(
    ("reported", "name"),
    [
        ("NVIDIA A100-SXM4-80GB", "a100-sxm-80"),
        ("NVIDIA A100 80GB PCIe", "a100-pcie-80"),
        ("NVIDIA H100 80GB HBM3", "h100-sxm"),
        ("NVIDIA L40S", "l40s"),
        ("NVIDIA GB200", "gb200"),
        ("AMD Instinct MI300X", "mi300x"),
        ("Tesla P100-SXM2-16GB", "p100"),
        ("NVIDIA GeForce RTX 4090", None),
    ],
)
def test_gpus_by_what_their_driver_calls_them(reported, name):
    assert gpu_reported_as(reported) == name


def test_a_sweep_replaces_what_was_assumed():
    # A machine with cores twice as fast as assumed, by the model itself: the fit has to find it again.
    work = load_workload("transformer")
    training = script_training(work, per_rank=8)
    node = Node(gpu="cpu", local=1, engine="mpi")
    blind = predict(training, node, networks(1, adapters=1)).rows[0].step_s
    seconds = {str(batch): [blind.value / 2 * batch / 8] * 5 for batch in (4, 8, 16, 32)}
    sweep = make_sweep(measured(seconds), "transformer", image_size=None)
    found = predict(training, node, networks(1, adapters=1), calibration=Calibration(sweeps=(sweep,)))
    told = found.rows[0].step_s
    assert told.value == pytest.approx(blind.value / 2, rel=0.1)
    assert told.high / told.low < 0.5 * blind.high / blind.low
    assert {each.kind for name, each in found.constants.items() if name == "cpu.pace"} <= {"measured", "assumed"}
    assert "measured" in {each.kind for each in found.constants.values()}


@pytest.mark.slow
@pytest.mark.parametrize(("engine", "between"), [("mpi", 4.0), ("gloo", 25.0)])
def test_buckets_are_as_large_as_the_engine_makes_them_by_default(engine, between):
    def rows(*overrides):
        training = recipe_training(load_recipe("goyal2017", overrides))
        found = predict(
            training, Node(gpu="cpu", local=2, engine=engine, rdma=False), networks(1, 2, adapters=1, gbit=1)
        )
        return [row.step_s for row in found.rows]

    alone, together = rows()
    assert alone == rows("communication.bucket_mb=25")[0]
    assert together == rows(f"communication.bucket_mb={between}")[1] != rows("communication.bucket_mb=13")[1]


def test_a_calibration_of_another_network_is_refused(tmp_path):
    seconds = {"8": [0.1, 0.1], "16": [0.2, 0.2]}
    sweep = make_sweep(measured(seconds), "convnet", image_size=None)
    path = tmp_path / "sweep.json"
    # Earlier versions wrote further keys.
    path.write_text(json.dumps({"sweeps": [{**sweep.model_dump(), "fixed_s": 0.0}]}))
    request = PredictionRequest(
        hardware=Hardware(gpu="cpu", gpus_per_node=2), nodes=[1], calibration=[path], backend="mpi"
    )
    with refused("HT-calibration-mismatch", kind="network", found="convnet", wanted="transformer"):
        predict_request(script_training(load_workload("transformer"), per_rank=8), request)


@pytest.mark.parametrize(
    ("text", "code", "key"),
    [
        ('{"sweeps": [{"model"', "HT-calibration-not-valid", "path"),
        ('{"rows": []}', "HT-calibration-not-valid", "path"),
        ('{"sweeps": [{"model": "convnet"}]}', "HT-calibration-not-valid", "path"),
        ("hello", "HT-calibration-not-valid", "path"),
    ],
)
def test_a_damaged_calibration_names_its_file(tmp_path, text, code, key):
    path = tmp_path / "found.json"
    path.write_text(text)
    with refused(code, **{key: path}):
        read_calibration([path])


def test_an_unknown_gpu_and_hardware_that_is_not_whole():
    training = recipe_training(load_recipe("goyal2017", []))
    for hardware, code in (
        (Hardware(gpu="h10", gpus_per_node=8), "HT-choice-unknown"),
        (Hardware(gpus_per_node=8), "HT-argument-missing"),
        (Hardware(gpu="h200"), "HT-argument-missing"),
        (Hardware(gpu="cpu"), "HT-argument-missing"),
    ):
        with refused(code):
            predict_request(training, PredictionRequest(hardware=hardware, nodes=[1]))


def test_explain_lists_the_constants_that_matter_most():
    found = of("goyal2017", 4)
    assert sum(cause.share for cause in found.causes) == pytest.approx(1)
    assert {found.causes[0].name, found.causes[1].name} & {"torch.compiled", "loader.images_per_s"}
    text = "\n".join(prediction_notes(found, explain=True))
    assert found.causes[0].name in text
    assert constants()[found.causes[0].name].source in text


def test_a_loader_that_is_too_slow_decides():
    two = ["data.workers=2"]
    slow = of("goyal2017", 1, overrides=two, calibration=Calibration(loaded={2: 64.0})).rows[0]
    assert slow.step_s.value == pytest.approx(32 / 64)
    calibrated = of("goyal2017", 1, overrides=two, calibration=Calibration(loaded={2: 1e6}))
    assert calibrated.rows[0].step_s.value < of("goyal2017", 1, overrides=two).rows[0].step_s.value
    assert not any("workers" in warning for warning in calibrated.warnings)
    # By default as many as a node has cores for.
    assert of("goyal2017", 1).rows[0].step_s.value < of("goyal2017", 1, overrides=two).rows[0].step_s.value
    assert any("11 workers" in warning for warning in of("goyal2017", 1).warnings)


def test_a_recipe_on_one_h100_is_what_was_measured_there():
    # goyal2017 in bf16 with 14 workers on one H100, 27 November 2026.
    per_gpu = ["batch.per_rank=256", "precision=bf16"]
    node = Node(gpu="h100-sxm", local=1, engine="nccl")

    def row(*overrides):
        training = recipe_training(load_recipe("goyal2017", [*per_gpu, *overrides]))
        return predict(training, node, networks(1)).rows[0].samples_per_s

    assert row("data.workers=14", "compile=off").low < 2500 < 2700 < row("data.workers=14", "compile=off").high
    # A batch that stays on the card, eager and compiled: benchmarks/one_gpu.py, 26 November 2026.
    eager, compiled = row(*FED, "compile=off"), row(*FED)
    assert eager.low < 256 / 0.0655 < eager.high < compiled.high
    assert compiled.low < 5579 < compiled.high


def test_a_gpu_that_decodes_does_not_wait_for_workers():
    by_workers, by_gpu = (
        of("goyal2017", 1, overrides=[f"data.decode={decode}", "data.workers=2"]) for decode in ("scaled", "gpu")
    )
    assert by_gpu.rows[0].samples_per_s.value > by_workers.rows[0].samples_per_s.value
    assert "loader.gpu_images_per_s" in by_gpu.constants and "loader.images_per_s" not in by_gpu.constants


@pytest.mark.parametrize(("batch", "seconds"), [(32, 0.0393), (64, 0.0429), (128, 0.0367), (256, 0.0655)])
def test_python_is_the_limit_of_small_eager_batches(batch, seconds):
    found = script_training(load_workload("resnet50", image_size=224), per_rank=batch, precision="bf16")
    (row,) = predict(found, Node(gpu="h100-sxm", local=1, engine="nccl"), networks(1)).rows
    assert row.step_s.low < seconds < row.step_s.high


def test_the_rank_that_has_most_samples_decides():
    (row,) = of("goyal2017", 6, overrides=["batch.per_rank=null", "batch.size=64"]).rows
    assert (row.batch_per_gpu, row.at_once) == (2, 2)
    assert row.samples_per_s.value == pytest.approx(64 / row.step_s.value)


def test_a_recipe_that_needs_an_engine_gets_it():
    training = recipe_training(load_recipe("goyal2017", ["fault_tolerance.lost_rank=shrink"]))
    request = PredictionRequest(hardware=Hardware(gpu="h100-sxm", gpus_per_node=8), nodes=[2])
    found = predict_request(training, request)
    assert found.node.engine == "mpi"
    assert any(" mpi" in warning for warning in found.warnings)


def test_memory_that_does_not_suffice_is_said():
    short = of("goyal2017", 1, overrides=["batch.per_rank=4096"])
    (warning,) = memory_warnings(short)
    assert "micro_batch" in warning and warning in prediction_record(short)["warnings"]
    assert memory_warnings(of("goyal2017", 1)) == []


def test_a_ramp_of_sizes_takes_the_memory_of_the_largest():
    ramp = recipe_training(load_recipe("ffcv-rn50", []))
    assert ramp.largest.sample.shape == (3, 192, 192)
    assert 160 < ramp.workload.sample.shape[1] < 192
    # It is validated with 256 pixels.
    assert validation_cost(ramp.recipe) == pytest.approx((256 / ramp.workload.sample.shape[1]) ** 2, rel=0.02)


def test_fewer_epochs_than_the_target_takes_are_said():
    recipe = load_recipe("mlperf-resnet50@8192", ["epochs=20"]).at(64)
    count, source = epochs(recipe, plain())
    assert count[0] == 20
    assert "41" in source and "44" in source


def test_bfloat16_is_no_faster_where_a_gpu_has_it_not():
    steps = {
        (gpu, precision): of("goyal2017", 1, gpu=gpu, overrides=[f"precision={precision}"]).rows[0].step_s.value
        for gpu in ("v100-sxm", "a100-sxm-40")
        for precision in ("bf16", "fp16")
    }
    assert steps["v100-sxm", "bf16"] > 1.5 * steps["v100-sxm", "fp16"]
    assert steps["a100-sxm-40", "bf16"] == steps["a100-sxm-40", "fp16"]
