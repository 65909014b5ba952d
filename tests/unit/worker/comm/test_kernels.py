"""Sums of arrays against NumPy in float64, and how a buffer is cut."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.worker.comm.shared.kernels import add_up, cut, sum_type

TYPES = [np.dtype(kind) for kind in (np.float64, np.float32, np.float16, ml_dtypes.bfloat16)]


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("terms", [1, 2, 5])
@pytest.mark.parametrize("factor", [None, 0.25])
def test_sums_are_those_of_float64(dtype, terms, factor):
    arrays = [(np.arange(1000) % 13 + term).astype(dtype) for term in range(terms)]
    wanted = np.sum([array.astype(np.float64) for array in arrays], axis=0) * (factor or 1.0)
    add_up(arrays[0], arrays, None if factor is None else np.array(factor, sum_type(dtype)))
    assert arrays[0].dtype == dtype
    np.testing.assert_array_equal(arrays[0].astype(np.float64), wanted)


@pytest.mark.parametrize("dtype", TYPES[2:], ids=str)
def test_16_bit_types_are_rounded_once(dtype):
    one, little = (np.full(3, value, dtype) for value in (1.0, 2.0**-9))
    # Added in bfloat16, each of the 64 would be lost.
    terms = [one.copy(), *[little] * 64]
    add_up(terms[0], terms)
    np.testing.assert_array_equal(terms[0].astype(np.float32), 1.125)


@given(st.integers(0, 5000), st.integers(1, 9), st.sampled_from([1, 8, 16, 32]))
def test_parts_cover_a_range_once_and_begin_aligned(length, parts, align):
    slices = cut(length, parts, align)
    assert len(slices) == parts
    assert [index for part in slices for index in range(length)[part]] == list(range(length))
    assert all(part.start % align == 0 for part in slices if part.start < length)
