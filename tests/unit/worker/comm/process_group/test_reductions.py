"""Reduce operations against NumPy in float64, over terms of which one may be the result's own memory."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from support.refusals import refused

torch = pytest.importorskip("torch")
dist = pytest.importorskip("torch.distributed")

from hpctrain.worker.comm.process_group.reductions import Reduction  # noqa: E402

NUMPY = {"SUM": np.sum, "AVG": np.mean, "PRODUCT": np.prod, "MIN": np.min, "MAX": np.max}
FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def numbers(numel: int, terms: int, most: int) -> list[np.ndarray]:
    return [(np.arange(numel) * 5 + 3 * term) % most for term in range(terms)]


@pytest.mark.parametrize("dtype", [*FLOATS, torch.int64], ids=str)
@pytest.mark.parametrize("own", [None, 0, 1, 2, 3])
@pytest.mark.parametrize("name", NUMPY)
def test_reductions_are_those_of_numpy(dtype, own, name):
    arrays = numbers(70_000, 4, 3 if name == "PRODUCT" else 16)
    if dtype == torch.int64:
        arrays = [array - 5 for array in arrays]
    terms = [torch.tensor(array, dtype=dtype) for array in arrays]
    out = torch.empty_like(terms[0]) if own is None else terms[own]
    Reduction.of(getattr(dist.ReduceOp, name), dtype, 4).into(out, terms)
    wanted = NUMPY[name](arrays, axis=0)
    np.testing.assert_array_equal(out.double().numpy(), np.trunc(wanted) if dtype == torch.int64 else wanted)


@pytest.mark.parametrize("dtype", FLOATS[2:], ids=str)
def test_16_bit_types_are_rounded_once(dtype):
    large = 256.0 if dtype == torch.bfloat16 else 2048.0
    terms = [torch.tensor([large]).to(dtype), *(torch.ones(1, dtype=dtype) for _ in range(3))]
    out = torch.empty(1, dtype=dtype)
    Reduction.of(dist.ReduceOp.SUM, dtype, 4).into(out, terms)
    assert out.item() == torch.tensor(large + 3).to(dtype).item() != large


def test_a_part_of_it_is_not_scaled():
    mean = Reduction.of(dist.ReduceOp.AVG, torch.bfloat16, 4)
    part = torch.empty(3)
    mean.into(part, [torch.ones(3, dtype=torch.bfloat16)] * 2, last=False)
    out = torch.empty(3, dtype=torch.bfloat16)
    mean.into(out, [part, part])
    assert part.tolist() == [2.0] * 3 and out.tolist() == [1.0] * 3


def test_a_sum_of_scaled_terms():
    out = torch.empty(3)
    Reduction.of(dist.ReduceOp.PREMUL_SUM(0.25), torch.float32, 2).into(out, [torch.ones(3), torch.full((3,), 3.0)])
    assert out.tolist() == [1.0] * 3


@pytest.mark.parametrize(
    ("operation", "dtype", "code", "name"),
    [
        (dist.ReduceOp.AVG, torch.bool, "HT-group-bad-argument", "AVG"),
        (dist.ReduceOp.PREMUL_SUM(0.25), torch.int32, "HT-group-bad-argument", "PREMUL_SUM"),
        (dist.ReduceOp.BAND, torch.float32, "HT-group-bad-argument", "BAND"),
        (SimpleNamespace(name="UNUSED"), torch.float32, "HT-group-bad-argument", "UNUSED"),
    ],
)
def test_what_cannot_be_reduced(operation, dtype, code, name):
    with refused(code, reduction=name):
        Reduction.of(operation, dtype, 2)
