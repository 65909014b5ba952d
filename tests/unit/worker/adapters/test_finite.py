"""One element of many that is not finite is found, and large ones are not taken for it."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

ODD = [math.nan, math.inf, -math.inf]


def torch_says(arrays: list[np.ndarray]) -> bool:
    torch = pytest.importorskip("torch")
    from hpctrain.worker.adapters.torch.guarding import are_finite, values_of

    values = values_of(torch.from_numpy(array) for array in arrays)
    return are_finite(values, float(torch.nn.utils.get_total_norm(values)))


def keras_says(arrays: list[np.ndarray]) -> bool:
    tf = pytest.importorskip("tensorflow")
    from hpctrain.worker.adapters.keras.variables import all_finite

    return bool(all_finite([tf.constant(array) for array in arrays]))


@pytest.mark.slow
@pytest.mark.parametrize("says", [torch_says, keras_says])
@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_one_odd_element_is_found_wherever_it_is(says, data):
    shapes = data.draw(st.lists(st.tuples(st.integers(1, 5), st.integers(1, 70)), min_size=1, max_size=4))
    random = np.random.default_rng(data.draw(st.integers(0, 999)))
    scale = data.draw(st.sampled_from([0.0, 1e-38, 1.0, 1e19, 3e37]))
    arrays = [(scale * random.normal(size=shape)).astype("f4") for shape in shapes]
    assert says(arrays)
    which = data.draw(st.integers(0, len(arrays) - 1))
    place = data.draw(st.integers(0, arrays[which].size - 1))
    arrays[which].flat[place] = data.draw(st.sampled_from(ODD))
    assert not says(arrays)
