"""Reduce operations against NumPy in float64, over terms of which one may be the result's own memory."""

from __future__ import annotations

import numpy as np
import pytest

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
