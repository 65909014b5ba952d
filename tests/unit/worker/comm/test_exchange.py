"""The order in which nodes exchange the pieces of a slice, over a network that delivers in any order in time."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.worker.comm.shared import exchange
from hpctrain.worker.comm.shared.exchange import Exchange
from hpctrain.worker.comm.timeout import Timeout

# Far more turns than any exchange here takes: after them every node waits for another.
_MOST_TURNS = 50_000


class _Network:
    """Messages between nodes: those of one sender with one tag come in the order in which they left, as MPI promises.

    A message leaves when it is received, as a large one does in MPI, unless it is ``eager``.
    """

    def __init__(self, *, eager: bool) -> None:
        self.eager = eager
        self.sent: dict[tuple[int, int, int], deque[_Request]] = defaultdict(deque)
        self.awaited: dict[tuple[int, int, int], deque[_Request]] = defaultdict(deque)

    def deliver(self) -> list[tuple[int, int, int]]:
        """The channels on which something can be delivered."""
        return [channel for channel, sent in self.sent.items() if sent and self.awaited[channel]]

    def deliver_on(self, channel: tuple[int, int, int]) -> None:
        sent, awaited = self.sent[channel].popleft(), self.awaited[channel].popleft()
        assert len(sent.buffer) == len(awaited.buffer)
        awaited.buffer[:] = sent.copy if self.eager else sent.buffer
        sent.done = awaited.done = True


class _Request:
    def __init__(self, buffer: np.ndarray, *, done: bool = False) -> None:
        self.buffer, self.done = buffer, done
        self.copy = buffer.copy()
        # Only then may the memory be used for something else.
        self.known_done = False

    def Test(self) -> bool:
        self.known_done = self.done
        return self.done


class _Peers:
    """What the exchange uses of a communicator."""

    def __init__(self, network: _Network, rank: int, size: int) -> None:
        self.network, self.rank, self.size = network, rank, size
        self.leaving: list[_Request] = []

    def Isend(self, buffer: np.ndarray, to: int, tag: int) -> _Request:
        request = _Request(buffer, done=self.network.eager)
        self.network.sent[self.rank, to, tag].append(request)
        self.leaving.append(request)
        return request

    def Irecv(self, buffer: np.ndarray, source: int, tag: int) -> _Request:
        assert not any(np.shares_memory(buffer, each.buffer) for each in self.leaving if not each.known_done)
        request = _Request(buffer)
        self.network.awaited[source, self.rank, tag].append(request)
        return request


class _Turns(Timeout):
    """Hands out what is waited for, instead of waiting."""

    def __init__(self) -> None:
        super().__init__("a rank")
        self.waits: list[Any] = []

    def wait(self, done: Any, *_: object, **__: object) -> None:
        self.waits.append(done)


def _exchange(slices: list[np.ndarray], wire: Any, message_bytes: int, *, eager: bool, turns: Iterator[int]) -> None:
    """Replace each node's slice by the sum, while ``turns`` says who or what is next."""
    network, timeout = _Network(eager=eager), _Turns()
    for rank, own in enumerate(slices):
        peers = cast("Any", _Peers(network, rank, len(slices)))
        Exchange(peers, timeout, message_bytes).prepare(own, np.dtype(wire), "it")(lambda: None)
    finished = [False] * len(slices)
    for _ in range(_MOST_TURNS):
        channels = network.deliver()
        choice = next(turns) % (len(slices) + len(channels))
        if choice < len(channels):
            network.deliver_on(channels[choice])
        else:
            finished[choice - len(channels)] = timeout.waits[choice - len(channels)]()
        if all(finished) and not network.deliver():
            break
    assert all(finished)
    assert not any(network.sent.values())
    assert not any(network.awaited.values())


@pytest.mark.long
@given(
    nodes=st.integers(2, 7),
    length=st.integers(0, 400),
    piece_bytes=st.integers(1, 8).map(lambda number: number * 8),
    ahead=st.integers(1, 8),
    eager=st.booleans(),
    seed=st.integers(0, 2**32 - 1),
)
def test_every_node_gets_the_sum_whatever_comes_first(nodes, length, piece_bytes, ahead, eager, seed):
    draws = np.random.default_rng(seed)
    slices = [draws.integers(-1000, 1000, length).astype(np.float64) for _ in range(nodes)]
    expected = np.sum(slices, axis=0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exchange, "_AHEAD", ahead)
        patch.setattr(exchange, "_AHEAD_OF_ONE", ahead)
        _exchange(slices, np.float64, piece_bytes, eager=eager, turns=iter(lambda: int(draws.integers(2**31)), None))
    for own in slices:
        np.testing.assert_array_equal(own, expected)


@pytest.mark.parametrize("eager", [True, False])
@pytest.mark.parametrize("nodes", [2, 3])
@pytest.mark.parametrize("wire", [np.float16, ml_dtypes.bfloat16])
def test_a_narrow_sum_is_rounded_once_and_the_same_on_all_nodes(wire, nodes, eager):
    draws = np.random.default_rng(0)
    slices = [draws.standard_normal(1000).astype(np.float32) for _ in range(nodes)]
    narrow = [own.astype(wire).astype(np.float32) for own in slices]
    expected = sum(narrow[1:], narrow[0]).astype(wire).astype(np.float32)
    _exchange(slices, wire, 128, eager=eager, turns=iter(lambda: int(draws.integers(2**31)), None))
    for own in slices:
        np.testing.assert_array_equal(own, expected)


def test_messages_that_are_under_way_when_it_fails_are_kept(monkeypatch):
    kept: list[object] = []
    monkeypatch.setattr(Timeout, "abandon", lambda _, requests: kept.append(requests))

    def check() -> None:
        raise RuntimeError("a rank died")

    network, timeout = _Network(eager=False), Timeout("a rank")
    timeout.survival = cast("Any", SimpleNamespace(check=check, explain=lambda error: None))
    exchange_ = Exchange(cast("Any", _Peers(network, 0, 3)), timeout)
    with pytest.raises(RuntimeError, match="a rank died"):
        exchange_.prepare(np.zeros(99, np.float32), np.dtype(np.float32), "it")(lambda: None)
    assert any(network.sent.values())
    assert len(kept) == 1
