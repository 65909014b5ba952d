"""Shared memory through which the ranks of a node pass the data of a collective, and which ranks share a node."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import torch

from hpctrain.common.errors import HpctrainError
from hpctrain.worker.comm.shared.nodes import LocalNode
from hpctrain.worker.comm.shared.segments import LINE_BYTES, Pause, Segment
from hpctrain.worker.comm.shared.worker import no_pause
from hpctrain.worker.comm.timeout import Timeout

_FIRST_BYTES = 1 << 16
# The largest piece of one rank. Half as much takes a tenth longer where ranks share their cores with others, because
# each turn waits for all of them; twice as much gains nothing.
_MOST_BYTES = 8 << 20


class StagingBuffers:
    """Two halves of shared memory for each rank of a node, which take turns.

    One barrier per turn is enough: a rank that writes to a half again has passed the barrier of the other half, at
    which all ranks had finished reading this one. Creating and freeing it is collective over the node.
    """

    def __init__(self, node: LocalNode, timeout: Timeout) -> None:
        self._node = node
        self._timeout = timeout
        self.what = ""
        self._identity = 0
        self.pause: Pause = no_pause
        # The collectives that this rank took part in, by identity, to name the one that another rank is in.
        self._known: dict[int, str] = {}
        self._allocate(_FIRST_BYTES)

    def _allocate(self, half: int) -> None:
        self._half = half
        self._segment = Segment(self._node, 2 * half, self._timeout)
        views = [torch.from_numpy(view) for view in self._segment.views]
        self._halves = [[view[start : start + half] for view in views] for start in (0, half)]
        index = self._segment.index
        self._own_marks = self._segment.marks[index]
        self._others = [marks for rank, marks in enumerate(self._segment.marks) if rank != index]

    def begin(self, what: str, pause: Pause) -> None:
        """Begin a collective, which ``what`` names with its sizes, the same on all ranks."""
        self.what = what
        self.pause = pause
        self._identity = zlib.crc32(what.encode())
        self._known[self._identity] = what

    def step(self, slots: int, longest: int) -> int:
        """The size of a slot in one turn, in bytes: a multiple of a cache line. Collective over the node.

        It depends on the number of ``slots`` of a half and the bytes of the ``longest`` data that a slot has to pass
        alone, so it is the same on all nodes. The segment grows if a half is too small for the slots.
        """
        most = max(LINE_BYTES, _MOST_BYTES // slots // LINE_BYTES * LINE_BYTES)
        step = min(most, -(-longest // LINE_BYTES) * LINE_BYTES)
        if slots * step > self._half:
            # Proves that all ranks are in the same collective before they free the segment together.
            self.meet()
            with self._timeout.blocking("giving shared memory back"):
                self._forget()
                self._segment.free()
            self._allocate(max(slots * step, min(2 * self._half, _MOST_BYTES)))
        return step

    def show(self) -> list[torch.Tensor]:
        """The half of each rank of the node for this turn: its owner writes before :meth:`meet`, all read after it."""
        return self._halves[(self._segment.barriers + 1) & 1]

    def meet(self) -> None:
        """Wait until all ranks of the node have called this, and check that they are in the same collective."""
        turn = (self._segment.barriers + 1) & 1
        self._own_marks[turn] = self._identity
        self._segment.barrier(self.what, self.pause)
        for marks in self._others:
            if marks[turn] != self._identity:
                raise self._differ(marks[turn])

    def _differ(self, theirs: int) -> HpctrainError:
        return HpctrainError(
            "HT-ranks-in-different-calls",
            "a rank is in {other} where another is in {call}",
            "call the collectives of a process group in the same order, and with the same sizes, on all of its ranks",
            exit_code=1,
            other=self._known.get(theirs, "another collective"),
            call=self.what,
        )

    def _forget(self) -> None:
        self._halves = []
        self._own_marks = memoryview(b"")
        self._others = []

    def free(self) -> None:
        """Free the memory. No view of it may be used afterwards."""
        self._forget()
        self._segment.free()


class NodesOfRanks:
    """The ranks of a group by node, seen from one of them.

    A node's messages are divided among its ranks by their index on the node, so that all of them drive the network and
    each byte travels to a node once.

    Args:
        homes: by rank, the first rank of the rank's node.

    Attributes:
        nodes: the ranks of each node in ascending order; nodes in the order of their first rank.
        node, index: the number of this rank's node, and the index of this rank among its ranks.
        here: the ranks of this node.
    """

    def __init__(self, rank: int, homes: Sequence[int]) -> None:
        self.rank, self.size = rank, len(homes)
        firsts = dict.fromkeys(homes)
        self.nodes = [tuple(member for member, home in enumerate(homes) if home == first) for first in firsts]
        self._place = {
            member: (node, index) for node, ranks in enumerate(self.nodes) for index, member in enumerate(ranks)
        }
        self.node, self.index = self._place[rank]
        self.here = self.nodes[self.node]

    def node_of(self, rank: int) -> int:
        """The number of a rank's node."""
        return self._place[rank][0]

    def partner(self, rank: int, node: int) -> int:
        """The rank of ``node`` that exchanges messages with ``rank``; on its own node that is the rank itself."""
        ranks = self.nodes[node]
        return ranks[self._place[rank][1] % len(ranks)]

    def holdings(self, ranks: Sequence[int], node: int) -> list[list[int]]:
        """Those of ``ranks`` whose data each rank of ``node`` holds for the node, by index: itself and others."""
        held: list[list[int]] = [[] for _ in self.nodes[node]]
        for rank in ranks:
            held[self._place[self.partner(rank, node)][1]].append(rank)
        return held

    def most_held(self, ranks: Sequence[int]) -> int:
        """The largest number of these ranks whose data one rank of any node holds."""
        return max(len(held) for node in range(len(self.nodes)) for held in self.holdings(ranks, node))
