"""Ranks that wait for each other in different places, simulated: who is told, and who never is."""

from __future__ import annotations

import re
import threading
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.common.errors import HpctrainError
from hpctrain.worker.comm import deadlocks
from hpctrain.worker.comm.deadlocks import (
    ANNOUNCE_SECONDS,
    DeadlockDetector,
    StoreDeadlockDetector,
    WaitPlace,
    deadlock_error,
)
from hpctrain.worker.comm.timeout import CONTROL, END, REDUCTION, Wait
from support import needs
from support.refusals import check

KINDS = (REDUCTION, CONTROL, END)


class Ranks:
    """Ranks whose messages arrive when :meth:`tick` says so."""

    def __init__(self, size: int) -> None:
        self.now = 0.0
        self.queue: deque[tuple[int, int, tuple[object, ...]]] = deque()
        self.waits: list[Wait | None] = [None] * size
        self.starved: set[int] = set()
        # The ranks whose watching thread does not run.
        self.unwatched: set[int] = set()
        self.ranks = [
            DeadlockDetector(rank, size, self._sender(rank), lambda number: f"rank {number}", lambda: 5)
            for rank in range(size)
        ]

    def _sender(self, source: int):
        return lambda rank, *message: self.queue.append((source, rank, message))

    def wait(self, rank: int, kind: str | None) -> None:
        self.waits[rank] = None if kind is None else Wait(what=str(kind), since=self.now, kind=kind)

    def tick(self, seconds: float) -> None:
        self.now += seconds
        for rank, wait in enumerate(self.waits):
            if wait is not None and rank not in self.starved:
                wait.polls += 10
        arrived, self.queue = self.queue, deque()
        for rank, detector in enumerate(self.ranks):
            if rank in self.unwatched:
                self.queue.extend(message for message in arrived if message[1] == rank)
                continue
            for source, to, message in arrived:
                if to == rank:
                    detector.receive(source, *message)
            detector.look(self.waits[rank], self.now)

    @property
    def errors(self) -> list[str]:
        return [str(detector.error) for detector in self.ranks if detector.error]


@given(st.lists(st.sampled_from(KINDS), min_size=2, max_size=6))
def test_all_ranks_are_told_where_they_wait_in_different_places_and_none_where_not(kinds):
    ranks = Ranks(len(kinds))
    for rank, kind in enumerate(kinds):
        ranks.wait(rank, kind)
    for _ in range(20):
        ranks.tick(ANNOUNCE_SECONDS / 2)
    assert len(ranks.errors) == (len(kinds) if len(set(kinds)) > 1 else 0)
    assert len(set(ranks.errors)) <= 1


@pytest.mark.long
@given(st.data())
def test_ranks_that_go_on_are_never_told_whatever_they_wait_in(data):
    """One rank works all the time, and waits for less than what is told of."""
    ranks = Ranks(3)
    worker = data.draw(st.integers(0, 2))
    for turn in range(20):
        for rank in range(3):
            if rank != worker and data.draw(st.booleans()):
                ranks.wait(rank, data.draw(st.sampled_from((*KINDS, None))))
        ranks.wait(worker, KINDS[turn % 3] if turn % 2 else None)
        ranks.tick(ANNOUNCE_SECONDS / 2)
    assert ranks.errors == []


def test_a_rank_whose_message_is_late_has_to_confirm_it():
    """Rank 1 left its wait while the others were not told of that yet."""
    ranks = Ranks(2)
    ranks.wait(0, REDUCTION)
    ranks.wait(1, CONTROL)
    for _ in range(2):
        ranks.tick(0.6)
    ranks.wait(1, None)
    ranks.ranks[1].look(None, ranks.now)  # its "out" is on the way, after nothing
    late = [message for message in ranks.queue if message[0] == 1]
    ranks.queue.clear()
    for _ in range(6):
        ranks.tick(ANNOUNCE_SECONDS)
    assert ranks.errors == []
    ranks.queue.extend(late)
    ranks.tick(ANNOUNCE_SECONDS)
    assert ranks.errors == []


def test_a_wait_counts_only_if_its_thread_has_found_it_to_go_on():
    """The wait of rank 1 may be over: its thread has not run since."""
    ranks = Ranks(2)
    ranks.wait(0, REDUCTION)
    ranks.wait(1, CONTROL)
    ranks.starved = {1}
    for _ in range(12):
        ranks.tick(ANNOUNCE_SECONDS)
    assert ranks.errors == []
    ranks.starved.clear()
    for _ in range(9):
        ranks.tick(ANNOUNCE_SECONDS)
    assert len(ranks.errors) == 2


@pytest.mark.parametrize("blocked", [False, True])
def test_a_rank_that_looks_seldom_confirms_too(blocked):
    """Its watching thread runs every 5 s."""
    ranks = Ranks(2)
    ranks.wait(0, REDUCTION)
    ranks.waits[1] = Wait(what="barrier", since=0.0, kind=CONTROL, blocked=blocked)
    for turn in range(40):
        ranks.unwatched = {1} if turn % 5 else set()
        ranks.tick(ANNOUNCE_SECONDS)
    assert len(ranks.errors) == 2


@needs.pytorch
@pytest.mark.parametrize("goes_on", [False, True])
def test_through_a_store_every_rank_has_to_announce_its_wait_again(goes_on):
    from torch.distributed import HashStore

    store = HashStore()
    ranks = [
        StoreDeadlockDetector(store, rank, ["rank 0 on h1", "rank 1 on h1"], {0: "rank 0"}, lambda: 5)
        for rank in range(2)
    ]
    ranks[0].announce(REDUCTION, "gradients")
    ranks[1].announce(CONTROL, "comm.barrier")
    ranks[0].look()
    for _ in range(2):
        ranks[0].look(again=True)
        if goes_on:
            # Rank 1 waits somewhere else: what it announces of a wait says nothing about the next.
            ranks[1].withdraw()
            ranks[1].announce(CONTROL, "comm.barrier")
        ranks[1].look(again=True)
    if goes_on:
        ranks[0].look()
        return
    for rank in ranks:
        with pytest.raises(HpctrainError) as raised:
            rank.look()
        assert "rank 0 on h1" in str(raised.value) and "rank 1 on h1" in str(raised.value)


@needs.pytorch
def test_through_a_store_ranks_in_one_place_are_not_told():
    from torch.distributed import HashStore

    store = HashStore()
    ranks = [
        StoreDeadlockDetector(store, rank, ["rank 0 on h1", "rank 1 on h1"], {0: "rank 0"}, lambda: 5)
        for rank in range(2)
    ]
    for _ in range(6):
        for rank in ranks:
            rank.announce(CONTROL, "comm.barrier")
            rank.look(again=True)


@needs.pytorch
@pytest.mark.parametrize("late", [{0}, set()])
def test_the_rank_that_does_not_leave_a_call_is_missing_where_one_of_the_others_was_late(monkeypatch, late):
    """Rank 0 waited to the limit, or else nobody did, as where rank 2 has died."""
    from torch.distributed import HashStore

    monkeypatch.setattr(deadlocks, "_LEAVE_SECONDS", 0.6)
    store, names = HashStore(), ["rank 0", "rank 1", "rank 2"]
    ranks = [StoreDeadlockDetector(store, rank, names, {0: "rank 0"}, lambda: 5) for rank in range(3)]
    with ThreadPoolExecutor() as pool:
        found = list(pool.map(lambda rank: ranks[rank].missing(late=rank in late), range(2)))
    assert found == [{2: "rank 2"} if late else {}] * 2
    with ThreadPoolExecutor() as pool:
        assert list(pool.map(lambda rank: rank.missing(late=True), ranks)) == [{}] * 3, "all have left"


@needs.pytorch
def test_what_keeps_a_store_that_does_not_answer_is_missing(monkeypatch):
    from torch.distributed import HashStore

    monkeypatch.setattr(deadlocks, "_LEAVE_SECONDS", 0.1)
    monkeypatch.setattr(deadlocks, "_ANSWER_SECONDS", 0.1)
    over = threading.Event()

    class Store(HashStore):
        def multi_get(self, keys):
            over.wait(60)

    rank = StoreDeadlockDetector(Store(), 0, ["rank 0"], {-1: "the torchrun on h1"}, lambda: 5)
    try:
        assert rank.missing(late=True) == {-1: "the torchrun on h1"}
    finally:
        over.set()


def test_the_error_says_who_is_where_and_what_to_do():
    left = WaitPlace(kind=END, what="allgather", passes=35)
    inside = WaitPlace(kind=REDUCTION, what="gradients.0.1", passes=36)
    error = deadlock_error({0: inside, 1: left, 2: inside}, lambda rank: f"rank {rank}")
    assert error is not None and error.exit_code == 1
    places = {"rank 0": inside, "rank 1": left, "rank 2": inside}
    check(error, "HT-ranks-in-different-places", places={name: asdict(each) for name, each in places.items()})
    where = error.values["where"].split("; ")
    assert [each.split(" in ")[0].split(" at ")[0] for each in where] == ["rank 0, rank 2", "rank 1"]
    assert [re.findall("pass ([0-9]+)", each) for each in where] == [["36"], ["35"]]
    assert "ht.shard" in error.hint
    loops = deadlock_error({0: inside, 1: replace(left, loop="user.py:7")}, str)
    assert loops is not None and "user.py:7" in loops.values["where"] and "leave a loop" in loops.hint
    both = deadlock_error({0: replace(inside, loop="user.py:7"), 1: replace(left, loop="user.py:7")}, str)
    assert both is not None and "user.py:7" not in both.values["where"]
    assert deadlock_error({0: inside, 1: inside}, str) is None


@pytest.mark.parametrize("kind", KINDS)
def test_a_crowd_is_named_in_short(kind):
    places = {rank: WaitPlace(kind=REDUCTION, what="", passes=1) for rank in range(40)}
    places[40] = WaitPlace(kind=kind if kind != REDUCTION else CONTROL, what="barrier", passes=1)
    error = deadlock_error(places, str)
    assert error is not None and " 32 more" in error.message
    assert len(error.values["places"]) == 8
