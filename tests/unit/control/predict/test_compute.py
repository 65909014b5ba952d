from __future__ import annotations

import pytest

from hpctrain.common.workloads.workload import load_workload
from hpctrain.control.predict.compute import Device, compute
from support.report.plain_values import one_layer, plain

IDEAL = {
    "memory_efficiency": 1.0,
    "conv_efficiency": 1.0,
    "matmul_efficiency": 1.0,
    "kernel_s": 1e-12,
    "a100_sxm_80__pace": 1.0,
}


def ideal(**more):
    given = {name.replace("a100_sxm_80", "a100-sxm-80"): value for name, value in {**IDEAL, **more}.items()}
    return plain(**given)


def test_arithmetic_decides_where_there_is_much_of_it():
    # 312 TFLOP/s and 2039 GB/s by the data sheet.
    work = one_layer(flops=312 * 10**9, backward_flops=624 * 10**9, elements=10, backward_elements=10)
    found = compute(work, 2, Device(name="a100-sxm-80", precision="bf16"), ideal())
    assert found.forward[0] == pytest.approx(2e-3, rel=1e-4)
    assert found.backward.sum(axis=0)[0] == pytest.approx(4e-3, rel=1e-4)


def test_traffic_decides_where_there_is_little_arithmetic():
    work = one_layer(flops=10, elements=2039 * 10**6, fixed_elements=2039 * 10**6)
    found = compute(work, 3, Device(name="a100-sxm-80"), ideal())
    # 4 bytes an element, 3 samples and the weights.
    assert found.forward[0] == pytest.approx(16e-3, rel=1e-4)


def test_float32_products_are_off_the_tensor_cores_and_convolutions_on_them():
    seconds = {
        kind: compute(one_layer(kind=kind, flops=10**12), 1, Device(name="a100-sxm-80"), ideal()).forward[0]
        for kind in ("conv", "matmul")
    }
    assert seconds["matmul"] / seconds["conv"] == pytest.approx(156 / 19.5)


def test_ranks_share_the_cores_of_a_host():
    work = load_workload("transformer")
    one, four = (compute(work, 8, Device(name="cpu", ranks=ranks), plain()).busy[0] for ranks in (1, 4))
    assert four > 2 * one


def test_fused_operators_move_less():
    work = load_workload("resnet50")
    apart, fused = (
        compute(work, 64, Device(name="h100-sxm", precision="fp16", fused=fused), plain()).total[0]
        for fused in (False, True)
    )
    assert fused < apart


def test_half_precision_is_faster_and_time_grows_with_the_batch():
    work = load_workload("resnet50")
    times = {
        (precision, batch): compute(work, batch, Device(name="v100-sxm", precision=precision), plain()).total[0]
        for precision in ("float32", "fp16")
        for batch in (32, 64)
    }
    assert times["fp16", 64] < times["float32", 64]
    assert times["fp16", 32] < times["fp16", 64] < 2 * times["fp16", 32]
