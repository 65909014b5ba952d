"""What of a sample is compared between ranks."""

from __future__ import annotations

import numpy as np
import pytest

from hpctrain.worker.adapters.same_data import summarise

torch = pytest.importorskip("torch")


@pytest.mark.parametrize("shape", [(), (3,), (100, 7)])
def test_the_same_numbers_of_another_type_differ(shape):
    kinds = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
    summaries = [summarise(torch.ones(shape, dtype=kind))[""] for kind in kinds]
    assert all(one.differs(other) == (a != b) for a, one in enumerate(summaries) for b, other in enumerate(summaries))


@pytest.mark.parametrize("kind", ["float32", "float64", "int64", "uint8"])
def test_a_tensor_looks_like_its_array(kind):
    array = np.arange(200).astype(kind)
    assert not summarise(torch.from_numpy(array))[""].differs(summarise(array)[""])
