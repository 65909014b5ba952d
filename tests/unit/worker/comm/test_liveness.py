"""Ranks that wait for each other in different places, simulated: who is told, and who never is."""

from __future__ import annotations

import re
import time
from collections import deque
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.common.errors import HpctrainError
from hpctrain.worker.comm import liveness
from hpctrain.worker.comm.boards import Board, MessageBoard, StoreBoard
from hpctrain.worker.comm.deadlocks import WaitPlace, deadlock_error
from hpctrain.worker.comm.liveness import ANNOUNCE_SECONDS, LivenessWatch, Peer
from hpctrain.worker.comm.timeout import CONTROL, END, REDUCTION, Timeout, Wait
from support import needs
from support.refusals import check

KINDS = (REDUCTION, CONTROL, END)


class Queue(MessageBoard):
    """A board whose messages arrive when the test says so."""

    def __init__(self, rank: int, size: int, queue: deque[tuple[int, int, object]], near_seconds: float = 0.0) -> None:
        super().__init__(rank, size, near_seconds)
        self._queue = queue

    def _send(self, rank: int, message: object) -> None:
        self._queue.append((self.rank, rank, message))


class Waits(Timeout):
    """A rank's waits, of which the test says what they are."""

    wait_now: Wait | None = None

    def oldest(self) -> Wait | None:
        return self.wait_now

    def leading(self) -> Wait | None:
        return self.wait_now if self.wait_now and self.wait_now.leads else None


def watch(board: Board, rank: int, size: int) -> LivenessWatch:
    peers = [Peer(first_rank=each, host="h1", pid=1, namespace=1, started=0.0) for each in range(size)]
    return LivenessWatch(board, Waits(str(peers[rank])), rank, peers, lambda: 5)


class Ranks:
    """Ranks whose messages arrive when :meth:`tick` says so."""

    def __init__(self, size: int) -> None:
        self.now = 0.0
        self.queue: deque[tuple[int, int, object]] = deque()
        self.starved: set[int] = set()
        # The ranks whose watching thread does not run.
        self.unwatched: set[int] = set()
        self.boards = [Queue(rank, size, self.queue) for rank in range(size)]
        self.ranks = [watch(board, board.rank, size) for board in self.boards]

    def wait(self, rank: int, kind: str | None, *, blocked: bool = False) -> None:
        wait = None if kind is None else Wait(what=str(kind), since=self.now, kind=kind, blocked=blocked)
        self.ranks[rank]._timeout.wait_now = wait

    def tick(self, seconds: float) -> None:
        self.now += seconds
        for rank, watching in enumerate(self.ranks):
            if (wait := watching._timeout.wait_now) and rank not in self.starved:
                wait.polls += 10
        arrived = list(self.queue)
        self.queue.clear()
        for rank, watching in enumerate(self.ranks):
            if rank in self.unwatched:
                self.queue.extend(message for message in arrived if message[1] == rank)
                continue
            for source, to, message in arrived:
                if to == rank:
                    self.boards[rank].handle(source, message)
            watching.look(self.now)

    @property
    def errors(self) -> list[str]:
        return [str(watching.deadlock()) for watching in self.ranks if watching.deadlock()]


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
    ranks.ranks[1].look(ranks.now)  # that its wait has ended is on the way
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
def test_a_rank_that_looks_seldom_confirms_too(blocked, monkeypatch):
    """Its watching thread runs every 5 s."""
    monkeypatch.setattr(liveness, "end_job", lambda _: None)
    ranks = Ranks(2)
    ranks.wait(0, REDUCTION)
    ranks.wait(1, CONTROL, blocked=blocked)
    for turn in range(40):
        ranks.unwatched = {1} if turn % 5 else set()
        ranks.tick(ANNOUNCE_SECONDS)
    assert len(ranks.errors) == 2


def test_a_rank_that_does_not_wait_is_named_by_the_lowest_that_waits(capsys, monkeypatch):
    """Rank 0 computes. Rank 2 comes late, and answers at once; rank 3 stops repeating that it waits."""
    monkeypatch.setattr(liveness, "request_stack", lambda *_: "")
    ranks = Ranks(4)
    for rank in (1, 3):
        ranks.wait(rank, CONTROL)
    for _ in range(117):
        ranks.tick(0.5)
    ranks.wait(2, CONTROL)
    for _ in range(8):
        ranks.tick(0.5)
    said = [line for line in capsys.readouterr().err.splitlines() if "stalled" in line]
    assert [line.partition(" stalled")[0] for line in said] == ["hpctrain: rank 0 on h1"]
    assert all(list(ranks.ranks[rank].stalled()) == [0] for rank in (1, 3))
    ranks.unwatched = {3}
    for _ in range(260):
        ranks.tick(0.5)
    assert "rank 3 on h1 stalled" in capsys.readouterr().err
    assert list(ranks.ranks[1].stalled()) == [0, 3]
    assert ranks.errors == []


def test_ranks_that_wait_by_another_thread_are_told_only_where_one_has_ended():
    """Only a rank that has left its script proves that the wait in a group will not end."""
    for kinds, told in (((END, REDUCTION), 2), ((CONTROL, REDUCTION), 0)):
        ranks = Ranks(2)
        for rank, kind in enumerate(kinds):
            ranks.wait(rank, kind)
        ranks.ranks[1]._timeout.wait_now.leads = False
        for _ in range(50):
            ranks.tick(1.0)
        assert ranks.errors == []
        for _ in range(50):
            ranks.tick(1.0)
        assert len(ranks.errors) == told


@pytest.fixture
def three() -> list[LivenessWatch]:
    """Three ranks that share a store."""
    from torch.distributed import HashStore

    store = HashStore()
    return [watch(StoreBoard(store, rank, 3), rank, 3) for rank in range(3)]


@needs.pytorch
@pytest.mark.parametrize("goes_on", [False, True])
def test_through_a_store_every_rank_has_to_announce_its_wait_again(three, goes_on):
    for rank, kind in enumerate(KINDS):
        three[rank]._timeout.wait_now = Wait(what=kind, since=0.0, kind=kind)
    for now in range(2, 40):
        if goes_on:
            # Rank 1 waits somewhere else: what it announces of a wait says nothing about the next.
            three[1]._timeout.wait_now = Wait(what="barrier", since=now - 1.5, kind=CONTROL)
        for rank in three:
            rank._timeout.wait_now.polls += 10
            rank.look(float(now))
    errors = [rank.deadlock() for rank in three]
    if goes_on:
        assert errors == [None] * 3
    else:
        assert all(isinstance(error, HpctrainError) and "rank 1 on h1" in str(error) for error in errors)


@needs.pytorch
def test_the_rank_that_does_not_come_to_a_call_of_pytorchs_own_is_missing(monkeypatch, three):
    """Ranks 0 and 1 wait in it to the limit, at nearly the same time."""

    def others_look(_):
        for _ in range(2):
            for rank in three:
                rank.look(time.monotonic())

    monkeypatch.setattr(liveness, "time", SimpleNamespace(monotonic=time.monotonic, sleep=others_look))
    assert three[0].missing() == {1: "rank 1 on h1", 2: "rank 2 on h1"}, "the limit of rank 1 is not over yet"
    assert three[1].missing() == {2: "rank 2 on h1"}
    assert three[0].missing() == {2: "rank 2 on h1"}


def test_the_error_says_who_is_where_and_what_to_do():
    left = WaitPlace(kind=END, what="allgather", passes=35)
    inside = WaitPlace(kind=REDUCTION, what="gradients.0.1", passes=36)
    error = deadlock_error({0: inside, 1: left, 2: inside}, lambda rank: f"rank {rank}")
    assert error is not None and error.exit_code == 1
    places = {"rank 0": inside, "rank 1": left, "rank 2": inside}
    check(error, "HT-ranks-in-different-places", places={name: str(each) for name, each in places.items()})
    where = error.values["where"].split("; ")
    assert [each.split(" in ")[0].split(" at ")[0] for each in where] == ["rank 0, rank 2", "rank 1"]
    assert [re.findall("pass ([0-9]+)", each) for each in where] == [["36"], ["35"]]
    assert "ht.shard" in error.hint
    assert deadlock_error({0: inside, 1: inside}, str) is None
