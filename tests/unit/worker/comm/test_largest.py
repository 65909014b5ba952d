"""Which elements are sent, and that over the sums nothing is lost."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.worker.comm.base import TopK
from hpctrain.worker.comm.shared import largest as module
from hpctrain.worker.comm.shared.largest import LargestElements, largest


def summed(nodes: list[LargestElements]) -> None:
    for node in nodes:
        node.pack()
    for node in nodes:
        node.messages[:] = [each.message for each in nodes]
    for node in nodes:
        node.unpack()


@given(st.lists(st.integers(0, 9), min_size=1, max_size=60), st.integers(0, 70), st.booleans())
def test_the_largest_are_chosen(values, most, sampled):
    magnitudes = np.array(values, dtype=np.float64)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_SAMPLED", 8 if sampled else 1 << 16)
        chosen = largest(magnitudes, most)
    assert len(set(chosen)) == len(chosen) <= most
    left = np.setdiff1d(np.arange(len(values)), chosen)
    if len(chosen) and len(left):
        assert magnitudes[chosen].min() >= magnitudes[left].max()
    if not sampled:
        assert len(chosen) == min(most, len(values))


def test_of_many_about_as_many_as_asked_for():
    magnitudes = np.abs(np.random.default_rng(0).standard_t(2, 1_000_000)).astype(np.float32)
    for most in (100, 10_000, 300_000):
        assert 0.6 * most <= len(largest(magnitudes, most)) <= most


@given(
    nodes=st.integers(2, 4),
    length=st.integers(1, 40),
    exact=st.integers(0, 5),
    fraction=st.floats(0.01, 0.99),
    steps=st.lists(st.sampled_from(["given", "odd"]), min_size=1, max_size=6),
    seed=st.integers(0, 2**32 - 1),
)
def test_what_is_given_is_sent_or_kept(nodes, length, exact, fraction, steps, seed):
    random, exact = np.random.default_rng(seed), min(exact, length)
    slices = [np.zeros(length) for _ in range(nodes)]
    elements = [LargestElements(own, TopK(fraction=fraction, exact=exact), nodes) for own in slices]
    given, sent = np.zeros(length), np.zeros(length)
    begin = length - exact
    for step in steps:
        numbers = random.integers(-50, 50, (nodes, length)).astype(np.float64)
        odd = step == "odd" and begin > 0
        if odd:
            numbers[random.integers(nodes), random.integers(begin)] = np.nan
        for own, number in zip(slices, numbers, strict=True):
            own[:] = number
        summed(elements)
        assert len({own.tobytes() for own in slices}) == 1
        # Exact ones at once, whatever the others are.
        np.testing.assert_array_equal(slices[0][begin:], numbers[:, begin:].sum(0))
        if odd:
            assert np.isnan(slices[0][:begin]).all()
        else:
            given += numbers.sum(0)
            sent += slices[0]
    kept = np.sum([each.kept for each in elements], axis=0)
    np.testing.assert_array_equal(sent[:begin] + kept, given[:begin])


def test_a_part_of_a_buffer_has_its_part_of_the_exact_ones():
    top = TopK(fraction=0.1, exact=7)
    assert [top.of(slice(start, start + 5), 20).exact for start in (0, 5, 10, 15)] == [0, 0, 2, 5]


def test_large_ones_at_equal_distances_are_found():
    magnitudes = np.ones(6_553_600, dtype=np.float32)
    magnitudes[::100] = 10
    assert len(largest(magnitudes, 65_536)) == 65_536


@pytest.mark.parametrize(("dtype", "large"), [(np.float32, 3e38), (np.float16, 60000)])
def test_what_overflows_with_what_is_kept_is_left_out_and_forgotten(dtype, large):
    own = np.zeros(2, dtype=dtype)
    element = LargestElements(own, TopK(fraction=0.5), 1)
    finite = []
    for first, second in ((large, large * 0.9), (1, large), (1, 1), (1, 1)):
        own[:] = first, second
        summed([element])
        finite.append(np.isfinite(own).all())
    # In the second step what was kept and what is new are too much together, and only that step is lost.
    assert finite == [True, False, True, True]
    assert np.isfinite(element.kept).all()


def test_an_odd_step_of_another_node_leaves_what_is_kept():
    slices = [np.array([1e8, 1e-3]), np.array([0.0, 0.0])]
    elements = [LargestElements(own, TopK(fraction=0.4), 2) for own in slices]
    summed(elements)
    kept = elements[0].kept.copy()
    slices[0][:], slices[1][:] = 1e8, np.nan
    summed(elements)
    np.testing.assert_array_equal(elements[0].kept, kept)
    assert kept[1] == 1e-3
