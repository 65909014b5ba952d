"""Memory in which the ranks of a node show each other a part of what a collective moves, and then the next."""

from __future__ import annotations

import zlib

import torch

from hpctrain.common.errors import HpctrainError
from hpctrain.worker.comm.shared.nodes import Node
from hpctrain.worker.comm.shared.segments import LINE_BYTES, Pause, Segment
from hpctrain.worker.comm.shared.worker import no_pause
from hpctrain.worker.comm.timeout import COLLECTIVE, Timeout

_FIRST_BYTES = 1 << 16
# What one rank shows at a time. Half as much takes a tenth longer where ranks share their cores with others, because
# each turn waits for all of them; twice as much gains nothing.
_MOST_BYTES = 8 << 20


class Staging:
    """Two halves of shared memory for each rank of a node, which take turns.

    One barrier a turn is enough: who writes to a half again has come to the barrier of the other one, and so have all
    that read the half before. Creating and freeing it is collective over the node.

    Args:
        node: the ranks.
        timeout: how they wait for each other.
    """

    def __init__(self, node: Node, timeout: Timeout) -> None:
        self._node = node
        self._timeout = timeout
        self._what = ""
        self._identity = 0
        self._pause: Pause = no_pause
        # What this rank took part in, to say so when another one does something else.
        self._known: dict[int, str] = {}
        self._allocate(_FIRST_BYTES)

    def _allocate(self, half: int) -> None:
        self._half = half
        self._segment = Segment(self._node, 2 * half, self._timeout, COLLECTIVE)
        views = [torch.from_numpy(view) for view in self._segment.views]
        self._halves = [[view[start : start + half] for view in views] for start in (0, half)]
        index = self._segment.index
        self._own_marks = self._segment.marks[index]
        self._others = [marks for rank, marks in enumerate(self._segment.marks) if rank != index]

    def begin(self, what: str, pause: Pause) -> None:
        """Begin a collective.

        Args:
            what: it is, with its sizes; the same on all ranks.
            pause: is called between two looks at the others.
        """
        self._what = what
        self._pause = pause
        self._identity = zlib.crc32(what.encode())
        self._known[self._identity] = what

    def step(self, slots: int, longest: int) -> int:
        """How many bytes of each of several slots a rank shows in a turn: a whole number of cache lines.

        It follows from the arguments alone, so that it is the same on all nodes where they are. Collective over the
        node where it makes room.

        Args:
            slots: into which a half is cut, at least one.
            longest: of what they are to show, in bytes.
        """
        most = max(LINE_BYTES, _MOST_BYTES // slots // LINE_BYTES * LINE_BYTES)
        step = min(most, -(-longest // LINE_BYTES) * LINE_BYTES)
        if slots * step > self._half:
            # All come to this together, or hear that they do not.
            self.meet()
            with self._timeout.blocking("giving shared memory back", COLLECTIVE):
                self._forget()
                self._segment.free()
            self._allocate(max(slots * step, min(2 * self._half, _MOST_BYTES)))
        return step

    def show(self) -> list[torch.Tensor]:
        """The bytes of each rank of the node that may be written until :meth:`meet` and read after it.

        Each rank writes to its own.
        """
        return self._halves[(self._segment.barriers + 1) & 1]

    def meet(self) -> None:
        """Wait until all ranks of the node have come.

        Raises:
            HpctrainError: one does not come in time, or is in another collective.
        """
        turn = (self._segment.barriers + 1) & 1
        self._own_marks[turn] = self._identity
        self._segment.barrier(self._what, self._pause)
        for marks in self._others:
            if marks[turn] != self._identity:
                raise self._differ(marks[turn])

    def _differ(self, theirs: int) -> HpctrainError:
        return HpctrainError(
            f"a rank is in {self._known.get(theirs, 'another collective')} where another is in {self._what}",
            "call the collectives of a process group in the same order, and with the same sizes, on all of its ranks",
            exit_code=1,
        )

    def _forget(self) -> None:
        self._halves = []
        self._own_marks = memoryview(b"")
        self._others = []

    def free(self) -> None:
        """Give the memory back. No view may be used after it."""
        self._forget()
        self._segment.free()
