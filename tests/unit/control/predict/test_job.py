from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.control.predict.compute import Compute
from hpctrain.control.predict.job import overlapped_step, slowest

_SLICE = 1e-3


def columns(value):
    return np.array([float(value)])


def one_step(forward, backward, update, reductions, *, pace, jitter=0.0):
    """The total and the exposed seconds for plain numbers; reductions are (after so many layers, seconds)."""
    compute = Compute(
        forward=columns(forward),
        backward=np.array([[float(each)] for each in backward]),
        update=columns(update),
        busy=columns(0),
    )
    total = overlapped_step(
        compute,
        [(after, columns(seconds)) for after, seconds in reductions],
        pace=columns(pace),
        jitter=columns(jitter),
    )
    return float(total[0]), float(total[0] - compute.total[0])


def in_slices(forward, backward, update, reductions, pace):
    """The same by going through time in small slices: an independent reference, right to a few slices."""
    ends = np.cumsum([forward, *backward])
    work = now = 0.0
    queue, running, left = list(reductions), None, 0.0
    while work < ends[-1] - 1e-12 or queue or running is not None:
        if running is None and queue and work >= ends[queue[0][0]] - 1e-12:
            running, left = queue[0], queue[0][1]
            queue.pop(0)
        work = min(work + _SLICE * (pace if running else 1.0), ends[-1])
        if running is not None:
            left -= _SLICE
            running = None if left <= 0 else running
        now += _SLICE
    return now + update


def test_reductions_run_one_after_the_other():
    total, exposed = one_step(0, [1, 1, 1], 0, [(1, 4), (2, 1), (3, 1)], pace=1)
    assert (total, exposed) == pytest.approx((7, 4))


def test_nothing_is_computed_while_reductions_run_at_pace_0():
    assert one_step(1, [2, 3], 0.5, [(1, 2), (2, 1)], pace=0) == pytest.approx((9.5, 3))


def test_the_slowest_rank_decides():
    assert one_step(1, [2, 3], 0, [], pace=1, jitter=0.1) == pytest.approx((6.6, 0.6))


@given(
    forward=st.integers(0, 30),
    backward=st.lists(st.integers(1, 30), min_size=1, max_size=5),
    reductions=st.lists(st.integers(1, 60), max_size=5),
    pace=st.sampled_from([0.25, 0.5, 1.0]),
)
def test_events_agree_with_time_in_slices(forward, backward, reductions, pace):
    scale = 0.02
    forward, backward = forward * scale, [each * scale for each in backward]
    after = sorted(1 + index * len(backward) // max(1, len(reductions)) for index in range(len(reductions)))
    wanted = [(min(layers, len(backward)), seconds * scale) for layers, seconds in zip(after, reductions, strict=True)]
    total, exposed = one_step(forward, backward, 0.1, wanted, pace=pace)
    assert total == pytest.approx(in_slices(forward, backward, 0.1, wanted, pace), abs=12 * _SLICE)
    assert exposed >= -1e-9


@pytest.mark.parametrize(("ranks", "deviations"), [(1, 0), (2, 0.5642), (10, 1.5388), (100, 2.5076)])
def test_the_slowest_of_many(ranks, deviations):
    # Expected largest of so many standard normal draws: Harter 1961, table 1.
    assert slowest(ranks) == pytest.approx(deviations, abs=0.03)
