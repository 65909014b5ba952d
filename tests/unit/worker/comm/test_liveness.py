"""Ranks that wait and ranks that do not, simulated: who is named, and by whom."""

from __future__ import annotations

import re

from hpctrain.worker.comm import liveness
from hpctrain.worker.comm.boards import Announced
from hpctrain.worker.comm.liveness import LivenessWatch, Peer
from hpctrain.worker.comm.timeout import Timeout, Wait


class Shared:
    """A board that all ranks look at."""

    works = True

    def __init__(self, rank: int, waits: dict[int, Announced]) -> None:
        self._rank, self._waits = rank, waits

    def announce(self, wait: Announced | None) -> None:
        if wait is None:
            self._waits.pop(self._rank, None)
        else:
            self._waits[self._rank] = wait

    def receive(self) -> None: ...

    def read(self) -> dict[int, Announced]:
        return dict(sorted(self._waits.items()))


class Waits(Timeout):
    """A rank's waits, of which the test says what they are."""

    wait_now: Wait | None = None

    def oldest(self) -> Wait | None:
        return self.wait_now


def watch(board: Shared, rank: int, size: int) -> LivenessWatch:
    peers = [Peer(first_rank=number, host="h1", pid=1, namespace=1, started=0.0) for number in range(size)]
    return LivenessWatch(board, Waits(str(peers[rank])), rank, peers, lambda: 5)


class Ranks:
    def __init__(self, size: int) -> None:
        self.now = 0.0
        # The ranks whose watching thread does not run.
        self.unwatched: set[int] = set()
        waits: dict[int, Announced] = {}
        self.ranks = [watch(Shared(rank, waits), rank, size) for rank in range(size)]

    def wait(self, rank: int, what: str) -> None:
        self.ranks[rank]._timeout.wait_now = Wait(what=what, since=self.now)

    def go_on(self, seconds: float) -> None:
        end = self.now + seconds
        while self.now < end:
            self.now += 0.5
            for rank, watching in enumerate(self.ranks):
                if rank not in self.unwatched:
                    watching.look(self.now)


def test_a_rank_that_does_not_wait_is_named_by_the_lowest_that_waits(capsys, monkeypatch):
    """Rank 0 computes. Rank 2 comes late, and answers at once; rank 3 stops repeating that it waits."""
    monkeypatch.setattr(liveness, "request_stack", lambda *_: "")
    ranks = Ranks(4)
    for rank in (1, 3):
        ranks.wait(rank, "barrier")
    ranks.go_on(58)
    ranks.wait(2, "barrier")
    ranks.go_on(5)
    said = [line for line in capsys.readouterr().err.splitlines() if "stalled" in line]
    assert [line.partition(" stalled")[0] for line in said] == ["hpctrain: rank 0 on h1"]
    assert all(ranks.ranks[rank].awaited == ["rank 0 on h1"] for rank in (1, 3))
    ranks.unwatched = {3}
    ranks.go_on(130)
    assert "rank 3 on h1 stalled" in capsys.readouterr().err
    assert ranks.ranks[1].awaited == ["rank 0 on h1", "rank 3 on h1"]


def test_ranks_that_wait_in_different_places_are_named_once_with_these_and_what_to_do(capsys):
    ranks = Ranks(3)
    ranks.ranks[1]._timeout.leaving = True
    for rank, what in enumerate(("gradients.0", "barrier", "gradients.0")):
        ranks.wait(rank, what)
    ranks.go_on(200)
    told = capsys.readouterr().err
    places = r"gradients\.0 at .*pass 5 \(rank 0, 2\); barrier at the end of its .*\(rank 1\)"
    assert len(re.findall(f"every rank .* {places}", told)) == 1
    assert told.count("ht.shard") == 1
    (awaited,) = ranks.ranks[0].awaited
    assert "rank 1 on h1, in barrier at the end of its script" in awaited
    assert len(ranks.ranks[1].awaited) == 2
