"""Which ranks take longer than the others: by what each has measured of its own time."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.worker.comm import rank_times
from hpctrain.worker.comm.rank_times import RankTimes, slow_among
from support.thread_ranks import ThreadCommunicator, on_ranks

STEP = 1.0


class Others:
    """Three other ranks, whose steps take as long as this rank's: they compute 0.5 s of it and read for 0.1 s."""

    rank, size, host, measures_links = 2, 4, "n2", False

    def allgather_object(self, own: tuple[str, tuple[float, ...]]) -> list[tuple[str, tuple[float, ...]]]:
        _, times = own
        return [
            own if rank == self.rank else (f"n{rank}", (times[0], 0.5, 0.1, 0.0, *times[4:]))
            for rank in range(self.size)
        ]


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


def test_of_five_slow_ranks_two_are_named_a_comparison_later(clock):
    class Many(Others):
        size = 12

        def allgather_object(self, own):
            # The ranks from 0 to 4 take longer, as this one, which is rank 2.
            return [own if rank < 5 else other for rank, other in enumerate(super().allgather_object(own))]

    times, found = RankTimes(), []
    for _ in range(4):
        steps(times, clock, computing=0.8, samples=0.1)
        found.append([event.rank for event in times.slow_ranks(Many(), 20)])
    assert found == [[], [0, 1, 2], [3, 4], []]


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


@pytest.mark.parametrize(("computing", "named"), [((0.8, 0.8), 1), ((0.3, 1.3), 0)])
def test_a_rank_whose_steps_differ_by_more_than_the_ranks_do_is_not_named(clock, computing, named):
    times, found = RankTimes(), []
    for _ in range(3):
        for each in computing * 10:
            steps(times, clock, computing=each, samples=0.1, count=2)
        found += times.slow_ranks(Others(), 20)
    assert len(found) == named


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
    slow = slow_among(own, least=step / 20)
    # Rounding may change the order of ranks that are alike, and what is at the bound.
    scaled, rounded = slow_among(own * factor, least=step / 20 * factor), slow_among(own * (1 + 1e-12), least=step / 20)
    assert {*scaled} in ({*slow}, {*rounded})
    assert all(own[rank] > sorted(own)[(len(own) - 1) // 2] for rank in slow)
    assert slow_among(np.full_like(own, own[0])) == []


def named_links(slow: set[tuple[str, str]], hosts: str, *, computing: int | None = None) -> list[tuple[int, str]]:
    """The ranks that are named, with their causes, where messages between some hosts take five times as long."""

    class Linked(ThreadCommunicator):
        def __init__(self, comm: ThreadCommunicator) -> None:
            self.__dict__.update(comm.__dict__, host=hosts[comm.rank], measures_links=True)

        def seconds_of_message(self, target: int, source: int, nbytes: int) -> float:
            assert len({*hosts}) > 2, "two hosts cannot be compared"
            return 0.005 if (hosts[source], self.host) in slow else 0.001

    def work(comm: ThreadCommunicator) -> list[tuple[int, str]]:
        own = RankTimes()
        events = []
        for _ in range(2):
            own._steps.extend([(STEP, 0.8 if comm.rank == computing else 0.5, 0.0)] * 20)
            events += own.slow_ranks(Linked(comm), 20)
        return [(event.rank, event.cause) for event in events]

    first, *others = on_ranks(len(hosts), work)
    assert all(each == first for each in others)
    return first


@pytest.mark.parametrize("hosts", ["abc", "aabbcc", "abcd", "abcdef"])
@pytest.mark.parametrize("ways", ["out", "in", "both"])
def test_the_one_host_with_a_slow_link_is_named_whichever_way_is_slow(hosts: str, ways: str):
    for host in sorted({*hosts}):
        out, into = {(host, other) for other in hosts}, {(other, host) for other in hosts}
        slow = {"out": out, "in": into, "both": out | into}[ways]
        assert named_links(slow, hosts) == [(hosts.index(host), "link")]


def test_no_host_is_named_for_one_path_nor_one_of_two_nor_for_its_link_where_it_computes_longer():
    assert named_links({("a", "b")}, "abcd") == []
    assert named_links({("a", "b"), ("b", "a")}, "ab") == []
    slow = {("b", other) for other in "acd"}
    assert named_links(slow, "abcd", computing=1) == [(1, "computing")]


def test_links_are_not_measured_where_messages_take_little_of_a_step(clock):
    times, ranks = RankTimes(), Others()
    ranks.measures_links = True
    for _ in range(2):
        # This rank waits for nothing, and has no seconds_of_message.
        steps(times, clock, computing=0.9, samples=0.1)
        times.slow_ranks(ranks, 20)
