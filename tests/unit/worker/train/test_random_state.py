"""The generators of Python and NumPy go on where they were, whatever they are asked for."""

from __future__ import annotations

import random
from collections.abc import Iterator

import numpy as np
import pytest

from hpctrain.worker.train.random_state import random_state, seed, set_random_state


@pytest.fixture(autouse=True)
def unchanged() -> Iterator[None]:
    python, numpy = random.getstate(), np.random.get_state()
    yield
    random.setstate(python)
    np.random.set_state(numpy)


def draw() -> list[object]:
    python = [random.gauss(0, 1), random.random(), random.getrandbits(70), random.sample(range(1000), 5)]
    return [*python, *np.random.randn(3), *np.random.permutation(9), np.random.rand()]


@pytest.mark.parametrize("before", [0, 1, 2, 700])
def test_what_is_drawn_after_it_is_drawn_again(before: int) -> None:
    seed(7)
    for _ in range(before):
        # One of the two normal numbers that are drawn at once is kept in advance.
        random.gauss(0, 1)
        np.random.randn()
    state = {name: value.copy() for name, value in random_state().items()}
    assert {value.dtype.str for value in state.values()} == {"<i8"}
    drawn = draw()
    assert draw() != drawn
    set_random_state(state)
    assert draw() == drawn
    set_random_state(state)
    assert [each.tolist() for each in random_state().values()] == [each.tolist() for each in state.values()]


def test_a_seed_is_that_of_both() -> None:
    seed(3)
    assert (random.random(), np.random.rand()) == (random.Random(3).random(), np.random.RandomState(3).rand())


def test_what_is_missing_stays_as_it_is() -> None:
    before = random_state()
    set_random_state({})
    assert {name: value.tolist() for name, value in random_state().items()} == {
        name: value.tolist() for name, value in before.items()
    }
