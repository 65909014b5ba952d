"""Checksums of PyTorch parameters, wherever they lie: what the guard compares."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")
from hpctrain.worker.adapters.torch.guarding import checksums  # noqa: E402

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.uint8]


@settings(max_examples=60, deadline=None)
@given(data=st.data(), dtype=st.sampled_from(DTYPES))
def test_any_flipped_bit_changes_the_checksum(data, dtype):
    # a parameter may be a window of a larger buffer, so its first element may lie anywhere
    before, length, behind = (data.draw(st.integers(least, 9)) for least in (0, 1, 0))
    memory = np.random.default_rng(0).integers(0, 256, (before + length + behind) * dtype.itemsize, dtype=np.uint8)
    tensor = torch.from_numpy(memory).view(dtype)[before : before + length]
    place = data.draw(st.integers(8 * before * dtype.itemsize, 8 * (before + length) * dtype.itemsize - 1))
    clean = checksums([tensor])[0]
    memory[place // 8] ^= np.uint8(1 << place % 8)
    assert checksums([tensor])[0] != clean
    # and what lies beside it does not count
    memory[place // 8] ^= np.uint8(1 << place % 8)
    memory[: before * dtype.itemsize] ^= 255
    memory[(before + length) * dtype.itemsize :] ^= 255
    assert checksums([tensor])[0] == clean
