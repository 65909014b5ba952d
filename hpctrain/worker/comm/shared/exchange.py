"""Sums a slice over the nodes."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from hpctrain.worker.comm.base import TopK
from hpctrain.worker.comm.shared.kernels import Array, add_up, blocks, convert, cut
from hpctrain.worker.comm.shared.largest import LargestElements
from hpctrain.worker.comm.shared.segments import Pause
from hpctrain.worker.comm.timeout import REDUCTION, Timeout

if TYPE_CHECKING:
    from mpi4py import MPI

Transfer = Callable[[Pause], None]
# Open MPI's TCP sends 64 KiB, a header included, at once. Before more it asks the receiver, whose answer waits behind
# what that one sends itself: with 256 KiB an all-reduce over 1 Gbit/s takes half as long again.
TCP_MESSAGE_BYTES = 62 << 10
# An adapter that reads the memory of another one asks nobody, and starting a message costs as much as sending 62 KiB
# over it. Not measured.
RDMA_MESSAGE_BYTES = 1 << 20
# How many messages a node may be ahead of what came to it. With 6, four hosts on links of 1 Gbit/s take 1 % longer than
# TCP has to, with 32 it is 10 %: two senders meet at one receiver then, and another link has nothing to carry.
_AHEAD = 6
# Messages under way at one time, to all nodes and from each: they keep a link busy until somebody looks again.
_UNDER_WAY = 4
# Of two nodes none can get in a third one's way, so more may be on the link while the cores compute.
_AHEAD_OF_ONE, _UNDER_WAY_TO_ONE = 16, 8
_TERM, _SUM = 1, 2


class Exchange:
    """The ranks that reduce the same slice, one per node.

    The two halves of an all-reduce, with our own sum between them: each node adds up one part of the slice and hands
    it to all. That is one order of summation for all types on every MPI, which for MPI's own all-reduce is advice
    only, and float32 between 16-bit types; it sends what a ring sends.

    Parts travel in pieces, a message each, so that the halves overlap: the sum of a piece leaves while the rest of the
    part is still coming. Each half has a round for each other node: all nodes send to the next one, then to the one
    after it, and so on, so that a link carries the pieces of one sender at a time. To keep in step, a node waits for
    what comes to it before it sends more.

    Two nodes send each other the whole slice instead, and both add it up: no more travels, and no sum has to travel
    after it. Both come to the same bits where their processors do: of one kind, and with the same treatment of
    subnormal numbers.

    Args:
        peers: those ranks.
        timeout: how they wait for each other.
        message_bytes: what a message carries at most; the same on all of them.

    Attributes:
        sent_bytes: what this rank gave to MPI for other nodes so far: of a slice of B bytes on N nodes in both halves
            2 (N - 1) / N x B, the mean over the nodes; of the fraction f of float32 elements 2 (N - 1) x f x B.
    """

    def __init__(self, peers: MPI.Intracomm, timeout: Timeout, message_bytes: int = TCP_MESSAGE_BYTES) -> None:
        self._peers = peers
        self._message_bytes = message_bytes
        self._timeout = timeout
        self.sent_bytes = 0

    def prepare(self, own: Array, wire: np.dtype[Any] | TopK, what: str) -> Transfer:
        """A function that replaces ``own`` by its sum over the nodes, with the same bits on all of them.

        Args:
            own: the slice.
            wire: the type in which it travels, or how few of its elements do.
            what: is reduced, for messages.
        """
        if isinstance(wire, TopK):
            return self._of_largest(own, wire, f"{what} between nodes")
        pieces = _Pieces(own, wire, self._peers, self._message_bytes // wire.itemsize)
        under_way = _Transfer(self._peers, pieces)
        what = f"{what} between nodes"

        def transfer(pause: Pause) -> None:
            self.sent_bytes += pieces.leaving_bytes
            under_way.begin()
            try:
                self._timeout.wait(
                    under_way.advance, what, kind=REDUCTION, pause=pause, progress=lambda: under_way.messages
                )
            except BaseException:
                self._timeout.abandon(under_way)
                raise

        return transfer

    def _of_largest(self, own: Array, top: TopK, what: str) -> Transfer:
        """Each node sends its message to all others: they are few and small."""
        elements = LargestElements(own, top, self._peers.size)

        def transfer(pause: Pause) -> None:
            self.sent_bytes += len(elements.message) * (self._peers.size - 1)
            elements.give()
            self._timeout.finish(
                lambda: self._peers.Iallgather(elements.message, elements.messages), what, kind=REDUCTION, pause=pause
            )
            elements.take()

        return transfer


@dataclass(frozen=True, kw_only=True)
class _Round:
    """What a node sends to one other and gets from another one at the same time.

    Attributes:
        tag: of its messages: numbers to be added up, or sums.
        target, source: the other nodes.
        leaving, coming: the pieces.
        first: how many pieces come in the rounds before.
    """

    tag: int
    target: int
    source: int
    leaving: list[slice]
    coming: list[slice]
    first: int


class _Pieces:
    """A slice cut into a part a node, and each part into pieces.

    Args:
        own: the slice.
        wire: the type in which it travels.
        peers: the nodes.
        length: of a piece.

    Attributes:
        two: there are no more nodes, so that the part of each is the whole slice, and there is no second half.
        mine: the pieces of this node's part.
        rounds: of all halves.
        order: in which pieces come: numbers of a round, and of a piece in it.
        leaving_bytes: what this node sends.
    """

    def __init__(self, own: Array, wire: np.dtype[Any], peers: MPI.Intracomm, length: int) -> None:
        self._own = own
        self._node = node = peers.rank
        nodes = peers.size
        self._converts = wire != own.dtype
        self._travelling: Array = np.empty(len(own), dtype=wire) if self._converts else own
        self.two = nodes == 2
        parts = [slice(0, len(own))] * 2 if self.two else cut(len(own), nodes, 1)
        of_part = [
            [slice(start, min(start + length, part.stop)) for start in range(part.start, part.stop, length)]
            for part in parts
        ]
        self.mine = of_part[node]
        self._first = parts[node].start
        own_length = parts[node].stop - self._first
        # This node's own numbers stay where they are.
        self._received: Array = np.empty((nodes, own_length), dtype=wire)
        self._terms = [blocks([self._term(sender, piece) for sender in range(nodes)]) for piece in self.mine]
        self.rounds: list[_Round] = []
        first = 0
        for tag in (_TERM,) if self.two else (_TERM, _SUM):
            for distance in range(1, nodes):
                target, source = (node + distance) % nodes, (node - distance) % nodes
                leaving, coming = (of_part[target], self.mine) if tag == _TERM else (self.mine, of_part[source])
                self.rounds.append(
                    _Round(tag=tag, target=target, source=source, leaving=leaving, coming=coming, first=first)
                )
                first += len(coming)
        self.order = [(number, index) for number, each in enumerate(self.rounds) for index in range(len(each.coming))]
        # All parts but its own in the first half, its own once for each of the others in the second; of two nodes the
        # part of each is everything.
        self.leaving_bytes = (len(own) + (nodes - 2) * own_length) * wire.itemsize

    def _term(self, sender: int, piece: slice) -> Array:
        if sender == self._node:
            return self._travelling[piece]
        return self._received[sender, piece.start - self._first : piece.stop - self._first]

    def here(self, round_: _Round, piece: slice) -> NDArray[np.uint8]:
        """Where a piece of a round comes, as bytes."""
        array = self._term(round_.source, piece) if round_.tag == _TERM else self._travelling[piece]
        return _bytes(array)

    def there(self, round_: _Round, piece: slice) -> NDArray[np.uint8]:
        """A piece of a round that may leave, as bytes."""
        if round_.tag == _TERM:
            self._give(piece)
        return _bytes(self._travelling[piece])

    def _give(self, piece: slice) -> None:
        """Make this node's numbers for a piece travel."""
        if self._converts:
            convert(self._travelling[piece], self._own[piece])

    def add_up(self, number: int) -> None:
        """Replace a piece of this node's part by its sum, for which all nodes' numbers have come."""
        piece = self.mine[number]
        if not self.two:
            self._give(piece)
        for terms in self._terms[number]:
            add_up(terms[0], terms)
        if self._node > 0:
            np.copyto(self._travelling[piece], self._term(0, piece))
        self.take(piece)

    def take(self, piece: slice) -> None:
        """The sum of a piece is there."""
        if self._converts:
            convert(self._own[piece], self._travelling[piece])


@dataclass(frozen=True, kw_only=True)
class _Message:
    """One message to or from another node.

    Attributes:
        start: sends or receives it.
        ready: it may be started.
        done: is called when it has left or come.
    """

    start: Callable[[], MPI.Request]
    ready: Callable[[], bool]
    done: Callable[[], None]


class _Lane:
    """Messages that are started one after the other, ``at_once`` at a time."""

    def __init__(self, messages: Iterable[_Message], at_once: int) -> None:
        self._messages = tuple(messages)
        self._at_once = at_once
        self._under_way: deque[tuple[MPI.Request, _Message]] = deque()
        self.begin()

    def begin(self) -> None:
        """Start with the first message again."""
        self._waiting = iter(self._messages)
        self._next = next(self._waiting, None)

    def advance(self) -> bool:
        """Finish and start what can be; returns whether all are done."""
        under_way = self._under_way
        while under_way and under_way[0][0].Test():
            under_way.popleft()[1].done()
        while self._next and len(under_way) < self._at_once and self._next.ready():
            under_way.append((self._next.start(), self._next))
            self._next = next(self._waiting, None)
        return not under_way and self._next is None


class _Transfer:
    """The messages of a sum over the nodes, made once for all of its sums.

    Nodes never wait for each other in a circle: what a message waits for has an earlier round, or the same round and a
    lower number.

    Attributes:
        messages: how many of the sum that is under way have left or come.
    """

    def __init__(self, peers: MPI.Intracomm, pieces: _Pieces) -> None:
        self._peers = peers
        self._pieces = pieces
        others = range(peers.size - 1)
        at_once, self._ahead = (_UNDER_WAY_TO_ONE, _AHEAD_OF_ONE) if pieces.two else (_UNDER_WAY, _AHEAD)
        self._lanes = [_Lane(each, at_once) for each in (self._leaving(), *map(self._coming, others))]
        self.begin()

    def begin(self) -> None:
        """Begin a sum."""
        self.messages = 0
        # How many messages of each round have left, and have come.
        self._left = [0] * len(self._pieces.rounds)
        self._come = [0] * len(self._pieces.rounds)
        # Of each piece of this node's part, how many nodes' numbers are still to come; of two nodes its own have to
        # leave too, because the sum takes their place.
        others = self._peers.size - 1
        self._missing = [others + 1 if self._pieces.two else others] * len(self._pieces.mine)
        for lane in self._lanes:
            lane.begin()

    def advance(self) -> bool:
        """Do what can be done; returns whether that is all."""
        done = [lane.advance() for lane in self._lanes]
        return all(done)

    def _leaving(self) -> Iterator[_Message]:
        for number, round_ in enumerate(self._pieces.rounds):
            for index, piece in enumerate(round_.leaving):
                awaited = round_.first + min(index, len(round_.coming)) - self._ahead
                yield _Message(
                    start=partial(self._send, round_, piece),
                    ready=partial(self._may_leave, awaited, index if round_.tag == _SUM else None),
                    done=partial(self._has_left, number, index),
                )

    def _has_left(self, number: int, index: int) -> None:
        self.messages += 1
        self._left[number] += 1
        if self._pieces.two:
            self._is_there(index)

    def _send(self, round_: _Round, piece: slice) -> MPI.Request:
        return self._peers.Isend(self._pieces.there(round_, piece), round_.target, round_.tag)

    def _may_leave(self, awaited: int, added_up: int | None) -> bool:
        if added_up is not None and self._missing[added_up]:
            return False
        if awaited < 0:
            return True
        number, piece = self._pieces.order[awaited]
        return self._come[number] > piece

    def _coming(self, first: int) -> Iterator[_Message]:
        """What the source of a round sends, in both halves."""
        others = self._peers.size - 1
        for number in range(first, len(self._pieces.rounds), others):
            round_ = self._pieces.rounds[number]
            for index, piece in enumerate(round_.coming):
                yield _Message(
                    start=partial(self._peers.Irecv, self._pieces.here(round_, piece), round_.source, round_.tag),
                    # A sum comes into memory that this node's own numbers have to leave before.
                    ready=partial(self._may_come, others - 1 - first, index) if round_.tag == _SUM else _always,
                    done=partial(self._has_come, number, index),
                )

    def _may_come(self, number: int, index: int) -> bool:
        return self._left[number] > index

    def _has_come(self, number: int, index: int) -> None:
        self.messages += 1
        self._come[number] += 1
        round_ = self._pieces.rounds[number]
        if round_.tag == _SUM:
            self._pieces.take(round_.coming[index])
            return
        self._is_there(index)

    def _is_there(self, index: int) -> None:
        """Something that the sum of a piece waits for."""
        self._missing[index] -= 1
        if not self._missing[index]:
            self._pieces.add_up(index)


def _bytes(array: Array) -> NDArray[np.uint8]:
    view: NDArray[np.uint8] = array.view(np.uint8)
    return view


def _always() -> bool:
    return True
