"""The digits: what they hold and how they are divided."""

from __future__ import annotations

import numpy as np
import pytest

from hpctrain.common.recipes.load import load_recipe
from hpctrain.worker.data import load_digits, open_sources
from support.refusals import refused


def test_all_digits_are_in_one_of_the_two_sets():
    from sklearn.datasets import load_digits as bundled

    train, test = load_digits(test_fraction=0.2, seed=7)
    assert (len(train), len(test)) == (1437, 360)
    assert train.images.shape == (1437, 8, 8, 1)
    assert (train.images.dtype, train.labels.dtype) == (np.float32, np.int64)
    assert (train.images.min(), train.images.max()) == (0, 1)
    rows = np.concatenate([train.images, test.images]).reshape(-1, 64) * 16
    joined = np.column_stack([rows, np.concatenate([train.labels, test.labels])])
    source = np.column_stack(bundled(return_X_y=True))
    np.testing.assert_array_equal(joined[np.lexsort(joined.T)], source[np.lexsort(source.T)])


def validated_with(*overrides: str) -> bytes:
    _, test = open_sources(load_recipe("digits", overrides))
    everything = np.arange(len(test))
    return next(test.stream([everything], 0)).images.tobytes()


def test_a_split_seed_keeps_the_division_whatever_the_seed():
    kept = [validated_with("data.split_seed=0", f"seed={seed}") for seed in (0, 1, 2)]
    assert kept[0] == kept[1] == kept[2] == validated_with("seed=0")
    assert validated_with("seed=1") == validated_with("seed=2", "data.split_seed=1") != kept[0]


@pytest.mark.parametrize("fraction", [0.001, 0.999])
def test_a_set_without_all_classes_is_refused(fraction):
    with refused("HT-data-unfit"):
        load_digits(test_fraction=fraction, seed=0)
