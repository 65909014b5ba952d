"""Sums a slice over the nodes."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from hpctrain.worker.comm.shared.kernels import Array, add_up, blocks, convert, cut
from hpctrain.worker.comm.shared.segments import Pause
from hpctrain.worker.comm.timeout import Timeout

if TYPE_CHECKING:
    from mpi4py import MPI

Transfer = Callable[[Pause], None]
# Open MPI's TCP sends 64 KiB, a header included, at once. Before more it asks the receiver, whose answer queues behind
# the receiver's own data: with 256 KiB an all-reduce over 1 Gbit/s takes half as long again.
TCP_MESSAGE_BYTES = 62 << 10
# An RDMA adapter needs no answer from the receiver, and starting a message costs as much as sending 62 KiB. Not
# measured.
RDMA_MESSAGE_BYTES = 1 << 20
# How many more messages a node may send than it has received. With 6, four hosts on links of 1 Gbit/s take 1 % longer
# than TCP has to, with 32 it is 10 %: then two senders meet at one receiver while another link is idle.
_AHEAD = 6
# Messages under way at a time, to all nodes and from each: enough to keep a link busy between two polls.
_UNDER_WAY = 4
# Two nodes cannot obstruct a third, so more messages may be on the link while the cores compute.
_AHEAD_OF_ONE, _UNDER_WAY_TO_ONE = 16, 8
_TERM, _SUM = 1, 2


class Exchange:
    """The ranks that reduce the same slice, one per node.

    An all-reduce in two halves: each node adds up one part of the slice and sends it to all. So all types are summed in
    one order on every MPI, which the standard only recommends, and 16-bit types in float32. A node sends as much as in
    a ring.

    Parts travel in pieces, a message each, so that the halves overlap: the sum of a piece leaves while the rest of the
    part is still coming. Each half has a round for each other node: all nodes send to the next one, then to the one
    after it, and so on, so that a link carries the pieces of one sender at a time. To keep in step, a node waits for
    what comes to it before it sends more.

    Two nodes send each other the whole slice instead, and both add it up: no more travels, and no sum has to travel
    after it. Both come to the same bits where their processors do: of one kind, and with the same treatment of
    subnormal numbers.

    Attributes:
        sent_bytes: the bytes that this rank has sent to other nodes so far: for a slice of B bytes on N nodes
            2 (N - 1) / N x B, as a mean over the nodes.
    """

    def __init__(self, peers: MPI.Intracomm, timeout: Timeout, message_bytes: int = TCP_MESSAGE_BYTES) -> None:
        self._peers = peers
        self._message_bytes = message_bytes
        self._timeout = timeout
        self.sent_bytes = 0

    def prepare(self, own: Array, wire: np.dtype[Any], what: str) -> Transfer:
        """A function that replaces ``own`` by its sum over the nodes; values travel in the type ``wire``."""
        pieces = _Pieces(own, wire, self._peers, self._message_bytes // wire.itemsize)
        under_way = _Transfer(self._peers, pieces)
        what = f"{what} between nodes"

        def transfer(pause: Pause) -> None:
            self.sent_bytes += pieces.leaving_bytes
            under_way.begin()
            self._timeout.wait(under_way.advance, what, pause=pause, keep=under_way)

        return transfer


@dataclass(frozen=True, kw_only=True)
class _Round:
    """The pieces that a node sends to one other node while it receives pieces from another one.

    Attributes:
        tag: the MPI tag of its messages, which tells terms from sums.
        first: how many pieces come in the rounds before.
    """

    tag: int
    target: int
    source: int
    leaving: list[slice]
    coming: list[slice]
    first: int


class _Pieces:
    """A slice cut into a part per node, and each part into pieces of ``length`` elements.

    Attributes:
        two: whether there are two nodes, so that each adds up the whole slice and there is no second half.
        mine: the pieces of this node's part.
        rounds: the rounds of both halves.
        order: the order in which pieces come, as pairs of a round's number and a piece's number in it.
        leaving_bytes: how many bytes this node sends.
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
        # Terms of the other nodes; this node's own row stays unused, because its terms need not be copied.
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
        # The first half sends all parts but the node's own, the second its own to each other node. Of two nodes each
        # sends the whole slice once.
        self.leaving_bytes = (len(own) + (nodes - 2) * own_length) * wire.itemsize

    def _term(self, sender: int, piece: slice) -> Array:
        if sender == self._node:
            return self._travelling[piece]
        return self._received[sender, piece.start - self._first : piece.stop - self._first]

    def receive_buffer(self, round_: _Round, piece: slice) -> NDArray[np.uint8]:
        """The memory that a piece of a round is received into, as bytes."""
        array = self._term(round_.source, piece) if round_.tag == _TERM else self._travelling[piece]
        return _bytes(array)

    def send_buffer(self, round_: _Round, piece: slice) -> NDArray[np.uint8]:
        """A piece of a round in the type in which it travels, as bytes."""
        if round_.tag == _TERM:
            self._pack(piece)
        return _bytes(self._travelling[piece])

    def _pack(self, piece: slice) -> None:
        """Convert this node's terms for a piece to the type in which they travel."""
        if self._converts:
            convert(self._travelling[piece], self._own[piece])

    def add_up(self, number: int) -> None:
        """Replace a piece of this node's part by its sum, once the terms of all nodes have come."""
        piece = self.mine[number]
        if not self.two:
            self._pack(piece)
        for terms in self._terms[number]:
            add_up(terms[0], terms)
        if self._node > 0:
            np.copyto(self._travelling[piece], self._term(0, piece))
        self.unpack(piece)

    def unpack(self, piece: slice) -> None:
        """Write the sum of a piece, which has come, to the slice."""
        if self._converts:
            convert(self._own[piece], self._travelling[piece])


@dataclass(frozen=True, kw_only=True)
class _Message:
    """One message to or from another node; ``done`` is called when it has left or come."""

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
        """Begin again with the first message."""
        self._waiting = iter(self._messages)
        self._next = next(self._waiting, None)

    def advance(self) -> bool:
        """Finish and start messages where possible; returns whether all are done."""
        under_way = self._under_way
        while under_way and under_way[0][0].Test():
            under_way.popleft()[1].done()
        while self._next and len(under_way) < self._at_once and self._next.ready():
            under_way.append((self._next.start(), self._next))
            self._next = next(self._waiting, None)
        return not under_way and self._next is None


class _Transfer:
    """The messages that sum a slice over the nodes, made once and used for every sum.

    Nodes never wait for each other in a circle: a message only waits for ones of an earlier round, or of the same round
    with a lower number.
    """

    def __init__(self, peers: MPI.Intracomm, pieces: _Pieces) -> None:
        self._peers = peers
        self._pieces = pieces
        others = range(peers.size - 1)
        at_once, self._ahead = (_UNDER_WAY_TO_ONE, _AHEAD_OF_ONE) if pieces.two else (_UNDER_WAY, _AHEAD)
        self._lanes = [_Lane(each, at_once) for each in (self._leaving(), *map(self._coming, others))]
        self.begin()

    def begin(self) -> None:
        """Begin a new sum."""
        # How many messages of each round have left, and how many have come.
        self._left = [0] * len(self._pieces.rounds)
        self._come = [0] * len(self._pieces.rounds)
        # How many terms of each piece of this node's part are still to come. Of two nodes its own terms also have to
        # leave first, because the sum overwrites them.
        others = self._peers.size - 1
        self._missing = [others + 1 if self._pieces.two else others] * len(self._pieces.mine)
        for lane in self._lanes:
            lane.begin()

    def advance(self) -> bool:
        """Advance all messages; returns whether the sum is complete."""
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
        self._left[number] += 1
        if self._pieces.two:
            self._one_less_missing(index)

    def _send(self, round_: _Round, piece: slice) -> MPI.Request:
        return self._peers.Isend(self._pieces.send_buffer(round_, piece), round_.target, round_.tag)

    def _may_leave(self, awaited: int, added_up: int | None) -> bool:
        if added_up is not None and self._missing[added_up]:
            return False
        if awaited < 0:
            return True
        number, piece = self._pieces.order[awaited]
        return self._come[number] > piece

    def _coming(self, first: int) -> Iterator[_Message]:
        """The messages from one source, in both halves."""
        others = self._peers.size - 1
        for number in range(first, len(self._pieces.rounds), others):
            round_ = self._pieces.rounds[number]
            for index, piece in enumerate(round_.coming):
                yield _Message(
                    start=partial(
                        self._peers.Irecv, self._pieces.receive_buffer(round_, piece), round_.source, round_.tag
                    ),
                    # A sum is received into the memory of this node's own terms, which have to leave first.
                    ready=partial(self._may_come, others - 1 - first, index) if round_.tag == _SUM else _always,
                    done=partial(self._has_come, number, index),
                )

    def _may_come(self, number: int, index: int) -> bool:
        return self._left[number] > index

    def _has_come(self, number: int, index: int) -> None:
        self._come[number] += 1
        round_ = self._pieces.rounds[number]
        if round_.tag == _SUM:
            self._pieces.unpack(round_.coming[index])
            return
        self._one_less_missing(index)

    def _one_less_missing(self, index: int) -> None:
        """Note one term of a piece, and add the piece up after the last."""
        self._missing[index] -= 1
        if not self._missing[index]:
            self._pieces.add_up(index)


def _bytes(array: Array) -> NDArray[np.uint8]:
    view: NDArray[np.uint8] = array.view(np.uint8)
    return view


def _always() -> bool:
    return True
