"""The time limit suggested for a predicted duration, and what is said of a shorter one."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.control.schedulers.request import JobRequest
from hpctrain.control.schedulers.slurm.time_limit import limit_text, suggested_seconds, time_lines
from hpctrain.control.schedulers.slurm.times import slurm_seconds
from support.golden import check_text

HOUR = 3600.0


def request(**fields: Any) -> JobRequest:
    return JobRequest(name="job", **fields)


@given(high=st.floats(0, 1e8), early=st.integers(1, 65_535))
def test_a_suggestion_is_enough_and_round(high: float, early: int) -> None:
    found = suggested_seconds(high, request(signal_seconds=early))
    needed = high + 300 + early + 60
    unit = 600 if needed <= 4 * HOUR else 3600
    assert found % unit == 0 and needed <= found < needed + unit
    assert slurm_seconds(limit_text(found)) == found


@given(st.integers(0, 10**9))
def test_slurm_reads_a_limit_as_it_was_meant(seconds: int) -> None:
    assert slurm_seconds(limit_text(seconds)) == seconds


@pytest.mark.parametrize(
    ("high", "limit"), [(0, "0:10:00"), (3000, "1:00:00"), (4 * HOUR, "5:00:00"), (60 * HOUR, "2-13:00:00")]
)
def test_suggestions(high: float, limit: str) -> None:
    (line,) = time_lines(request(), 0.0, high)
    assert line.startswith(f"suggested: --time {limit} (")


def said(low: float, high: float, **fields: Any) -> str:
    (_, *lines) = time_lines(request(**fields), low, high)
    return "\n".join(lines)


def test_a_limit_that_is_long_enough_is_not_spoken_of() -> None:
    for time in ("3:00:00", "0", None):
        assert said(2 * HOUR, 3 * HOUR, time=time) == ""


def test_a_limit_within_the_range() -> None:
    ways = ({}, {"chain": 2}, {"requeue": False})
    check_text("time-limit-within", "\n".join(said(2 * HOUR, 3 * HOUR, time="2:30:00", **way) for way in ways))


def test_a_limit_that_is_too_short() -> None:
    # Of an hour, Slurm may leave 57 minutes: 5 hours take 6 of them, and 6 take 7.
    hours = {(5, 6): ({}, {"chain": 3}, {"chain": 7}, {"requeue": False}), (1.1, 1.2): ({},)}
    lines = [
        said(low * HOUR, high * HOUR, time="1:00:00", **way) for (low, high), ways in hours.items() for way in ways
    ]
    check_text("time-limit-short", "\n".join(lines))


def test_no_time_to_train_at_all() -> None:
    check_text("time-limit-none", said(HOUR, 2 * HOUR, time="0:03:00"))
