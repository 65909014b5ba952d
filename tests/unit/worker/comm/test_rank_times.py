"""Which ranks take longer than the others: by what each has measured of its own time."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.worker.comm import rank_times
from hpctrain.worker.comm.rank_times import RankTimes, slow_among

STEP = 1.0


class Others:
    """Three other ranks, whose steps take as long as this rank's: they compute 0.5 s of it and read for 0.1 s."""

    rank, size, host = 2, 4, "n2"

    def allgather_object(self, own: tuple[str, tuple[float, ...]]) -> list[tuple[str, tuple[float, ...]]]:
        host, times = own
        return [own if rank == self.rank else (host, (0.5, 0.1, *times[2:])) for rank in range(self.size)]


@pytest.fixture
def clock(monkeypatch) -> list[float]:
    now = [0.0]
    monkeypatch.setattr(rank_times.time, "perf_counter", lambda: now[0])
    return now


def steps(
    times: RankTimes, clock: list[float], *, computing: float, samples: float, count: int = 20, long: float = 0.0
) -> None:
    for more in [long, long, *[0.0] * (count - 2)]:
        with times.reads():
            clock[0] += samples
        clock[0] += computing + more
        with times.waits():
            clock[0] += max(0.0, STEP - computing - samples)
        times.step_done()


def test_a_rank_is_reported_in_its_second_slow_comparison_with_its_cause_and_once(clock):
    times, ranks = RankTimes(), Others()
    found = []
    for _ in range(4):
        steps(times, clock, computing=0.5, samples=0.4)
        found.append(times.slow_ranks(ranks, 20))
    assert [len(each) for each in found] == [0, 1, 0, 0]
    (event,) = found[1]
    assert (event.rank, event.host, event.cause, event.iteration) == (2, "n2", "samples", 20)
    assert (event.seconds, event.usual) == pytest.approx((0.4, 0.1))


def test_a_rank_that_recovered_is_reported_anew_and_one_slow_comparison_is_not(clock):
    times, ranks = RankTimes(), Others()
    counts = []
    for computing in (0.8, 0.8, 0.5, 0.8, 0.5, 0.8, 0.8):
        steps(times, clock, computing=computing, samples=0.1)
        counts.append([event.cause for event in times.slow_ranks(ranks, 1)])
    assert counts == [[], ["computing"], [], [], [], [], ["computing"]]


def test_few_long_steps_do_not_make_a_rank_slow(clock):
    times, ranks = RankTimes(), Others()
    for _ in range(3):
        steps(times, clock, computing=0.5, samples=0.1, long=30.0)
        assert times.slow_ranks(ranks, 20) == []


def test_waits_within_each_other_count_once_and_not_as_samples(clock):
    times = RankTimes()
    with times.reads():
        clock[0] += 1
        with times.waits():
            clock[0] += 2
            with times.waits():
                clock[0] += 4
    assert (times.waiting, times.samples) == (6, 1)


OWN = st.lists(st.floats(1e-4, 10), min_size=2, max_size=9).map(np.array)


@given(own=OWN, factor=st.floats(0.1, 10))
def test_who_is_slow_depends_on_ratios_alone_and_is_never_the_faster_half(own, factor):
    step = float(own.max())
    slow = slow_among(own, step)
    assert slow_among(own * factor, step * factor) in (slow, slow_among(own * (1 + 1e-12), step))
    assert all(own[rank] > sorted(own)[(len(own) - 1) // 2] for rank in slow)
    assert slow_among(np.full_like(own, own[0]), step) == []
