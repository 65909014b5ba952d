from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from hpctrain.common.run.step_records import StepRecord
from hpctrain.control.verify.differences import as_means, compare, factor
from support.step_records import step

FINITE = st.floats(-1e6, 1e6, allow_subnormal=False)
ARRAYS = arrays(np.float64, st.integers(1, 40), elements=FINITE)


def test_what_changes_otherwise_has_no_factor() -> None:
    values = np.arange(10.0)
    assert factor(values, values[::-1]) is None
    assert factor(values, np.full(10, math.nan)) is None
    assert factor(np.zeros(3), np.ones(3)) is None
    assert factor(values, values[:3]) is None


def _steps(by: float = 1.0, count: int = 2) -> list[StepRecord]:
    w = np.linspace(-1, 1, 9)
    return [step({"w": by * w}, {"w": w - 0.1 * number * by * w}) for number in range(1, count + 1)]


@given(st.floats(1e-7, 1e-5))
def test_differences_are_measured_against_the_noise(noise: float) -> None:
    one, noisy = _steps(), _steps(1 + noise)
    near, far = _steps(1 - 5 * noise), _steps(1 + 1000 * noise)
    assert not compare(one, noisy, [near, near]).different
    first = compare(one, noisy, [far, far]).different[0]
    assert (first.step, first.kind, first.name, first.rank) == (1, "gradient", "w", 0)
    assert first.difference == pytest.approx(1000 * noise) and first.noise == pytest.approx(noise)
    assert first.factor == pytest.approx(1 + 1000 * noise)


def test_ranks_that_differ_from_each_other_and_what_only_one_process_updates() -> None:
    one = _steps()
    found = compare(one, one, [one, _steps(2)])
    assert [(each.kind, each.rank) for each in found.between[:2]] == [("gradient", 1), ("parameter", 1)]
    more = [step({"w": [1.0], "v": [1.0]}, {"w": [1.0], "unused": [1.0]})]
    less = [step({"w": [1.0]}, {"w": [1.0]})]
    assert compare(more, more, [less, less]).missing == ["unused"]


@pytest.mark.parametrize(
    ("ranks", "how"),
    [
        ([[3.0, 1.0], [2.0]], "same"),
        ([[1.0, 2.0, 3.0], [3.0, 2.0, 1.0]], "same"),
        ([[1.0, 2.0], [4.0]], "other"),
        ([[1.0, 2.0], [2.0]], "other"),
        ([[3.0, 1.0], [2.0, 3.0]], "same"),
        ([[1.0, 2.0, 3.0], []], "same"),
        ([[], []], "unknown"),
    ],
)
def test_how_samples_lie_on_ranks(ranks: list[list[float]], how: str) -> None:
    one = [step({}, {"w": [1.0]}, samples=[1.0, 2.0, 3.0])]
    found = compare(one, one, [[step({}, {"w": [1.0]}, samples=each)] for each in ranks])
    assert found.samples == [how]


@given(ARRAYS, st.floats(0.1, 1))
def test_means_of_what_ranks_computed(own: np.ndarray, clipped: float) -> None:
    assume(np.linalg.norm(own) > 1e-3)
    parts = [0.5 * own, 1.5 * own]
    ranks = [[step({"w": clipped * own}, {"w": own}, own={"w": part})] for part in parts]
    assert as_means(ranks, 2) == [pytest.approx(clipped)]
    assume(np.linalg.norm(own[1:]) > 0.1 * np.linalg.norm(own))
    other = own + np.linalg.norm(own) * np.eye(len(own))[0]
    assert as_means([[step({"w": other}, {"w": own}, own={"w": part})] for part in parts], 2) is None
    assert as_means([[step({"w": own}, {"w": own})]], 1) is None
