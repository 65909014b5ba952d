"""What of a sample is compared between ranks."""

from __future__ import annotations

import copy

import numpy as np
import pytest

from hpctrain.common.errors import HpctrainError
from hpctrain.worker.adapters.same_data import compare_samples, summaries_of_few

torch = pytest.importorskip("torch")


def images(seed):
    return list(np.random.default_rng(seed).integers(0, 256, (9, 16, 16, 3), np.uint8))


def apart(one, other):
    try:
        compare_samples([summaries_of_few(one), summaries_of_few(other)])
    except HpctrainError:
        return True
    return False


@pytest.mark.parametrize(
    "samples",
    [
        list(range(9)),
        [{"key": f"{number:03}"} for number in range(9)],
        [b"%03d" % number for number in range(9)],
        images(0),
        list(np.random.default_rng(1).random((9, 4))),
        list(300 + np.random.default_rng(3).random((9, 200))),
        list(np.random.default_rng(4).random((9, 200)) * 1j),
    ],
)
def test_a_batch_that_is_divided_or_shuffled_differs(samples):
    assert not apart(samples, copy.deepcopy(samples))
    assert apart(samples, samples[1:])
    assert apart(samples, samples[::-1])


def test_two_decoders_are_allowed_for():
    noise = np.random.default_rng(6)
    one = images(5)
    other = [np.clip(each.astype(int) + noise.integers(-2, 3, each.shape), 0, 255).astype(np.uint8) for each in one]
    assert not apart(one, other)
