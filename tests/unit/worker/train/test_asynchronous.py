"""The rules of asynchronous training, with a vector in memory as the server."""

from __future__ import annotations

import numpy as np

from hpctrain.common.recipes.sync import Sync
from hpctrain.worker.train.asynchronous import Vector, rule_of


class InMemory:
    """A server of one process."""

    def __init__(self, vector: Vector) -> None:
        self.vector = vector.copy()

    def add(self, change: Vector) -> Vector:
        before = self.vector.copy()
        self.vector += change
        return before

    def push(self, change: Vector) -> None:
        self.vector += change

    def read(self) -> Vector:
        return self.vector.copy()


BEGUN = np.array([1, -2, 0.5], np.float32)
MOVES = [np.array(each, np.float32) for each in ([1, 0, 0], [0, 2, -1], [-3, 1, 1], [0.5, 0.5, 0.5])]


def test_downpour_in_step_is_the_mean_of_the_parameters() -> None:
    server = InMemory(BEGUN)
    ranks = [rule_of(Sync(mode="async"), server, BEGUN, 4) for _ in MOVES]
    for rank, move in zip(ranks, MOVES, strict=True):
        rank.exchange(BEGUN + move)
    np.testing.assert_allclose(server.vector, BEGUN + np.mean(MOVES, axis=0), rtol=0, atol=1e-6)


def test_downpour_of_one_rank_changes_nothing() -> None:
    server = InMemory(BEGUN)
    rank, own = rule_of(Sync(mode="async"), server, BEGUN, 1), BEGUN
    for move in MOVES:
        own = rank.exchange(own + move)
    np.testing.assert_allclose(own, BEGUN + np.sum(MOVES, axis=0), rtol=0, atol=1e-6)
    np.testing.assert_array_equal(own, server.vector)


def test_downpour_goes_on_from_what_others_have_added() -> None:
    server = InMemory(BEGUN)
    one, other = (rule_of(Sync(mode="async"), server, BEGUN, 2) for _ in range(2))
    other.exchange(BEGUN + MOVES[0])
    own = one.exchange(BEGUN + MOVES[1])
    np.testing.assert_allclose(own, BEGUN + (MOVES[0] + MOVES[1]) / 2, rtol=0, atol=1e-6)
    # Not the change that it has sent already.
    np.testing.assert_allclose(one.exchange(own), own, rtol=0, atol=1e-6)


def test_elastic_by_hand() -> None:
    """Algorithm 1 of Zhang et al., in float64."""
    server, sync = InMemory(BEGUN), Sync(mode="async", rule="easgd", moving_rate=0.8)
    ranks = [rule_of(sync, server, BEGUN, 4) for _ in range(2)]
    own = [BEGUN, BEGUN]
    theirs, center = [BEGUN.astype(float)] * 2, BEGUN.astype(float)
    for turn, move in enumerate(MOVES * 3):
        rank = turn % 2
        own[rank] = ranks[rank].exchange(own[rank] + move)
        moved = theirs[rank] + move
        difference = 0.2 * (moved - center)
        theirs[rank], center = moved - difference, center + difference
    np.testing.assert_allclose(own, theirs, rtol=0, atol=1e-5)
    np.testing.assert_allclose(server.vector, center, rtol=0, atol=1e-5)
