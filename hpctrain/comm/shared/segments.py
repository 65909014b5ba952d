"""Memory that the ranks of a node share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

import numpy as np
from numpy.typing import NDArray

from hpctrain.comm.patience import Patience

if TYPE_CHECKING:
    from mpi4py import MPI

Bytes = NDArray[np.uint8]

# A cache line: a counter has one for itself, and slices of a buffer begin at one.
LINE_BYTES = 64


class Segment:
    """One buffer of each rank of a node, all of the same size. Making and freeing it is collective over the node.

    Attributes:
        views: each local rank's bytes.
        own: this rank's.
    """

    def __init__(self, node: MPI.Intracomm, nbytes: int) -> None:
        from mpi4py import MPI

        padded = max(LINE_BYTES, -(-nbytes // LINE_BYTES) * LINE_BYTES)
        self._window = MPI.Win.Allocate_shared(padded, 1, comm=node)
        # One access epoch for its whole life: loads and stores go straight to memory, Sync orders them.
        self._window.Lock_all(MPI.MODE_NOCHECK)
        self.views: list[Bytes] = []
        for rank in range(node.size):
            memory, _ = self._window.Shared_query(rank)
            self.views.append(np.frombuffer(cast(memoryview, memory), dtype=np.uint8)[:nbytes])
        self.own = self.views[node.rank]
        self.own[:] = 0

    @property
    def address(self) -> int:
        """Where this rank's bytes begin."""
        return int(self.own.ctypes.data)

    def sync(self) -> None:
        """A memory barrier: what this process stored before is seen before what it stores after, and so for loads."""
        self._window.Sync()

    def free(self) -> None:
        """No view may be used after it."""
        self.views = []
        self.own = np.empty(0, dtype=np.uint8)
        self._window.Unlock_all()
        self._window.Free()


class Meeting:
    """A barrier of the ranks of a node in shared memory.

    Each rank has a counter that it alone writes. It raises it when it arrives, and has met the others once all counters
    are as high. Why no rank sees old data behind it: a rank's stores come before its ``Sync``, which comes before the
    store of its counter (a store barrier, MPI-4.1 section 12.7: Win_sync in the unified memory model); another rank
    loads the counter, then its ``Sync`` comes before its loads of the data (a load barrier). A counter is an aligned
    64-bit word, which is loaded and stored whole.

    Args:
        node: the ranks.
        ranks: their numbers in the run.
        patience: how they wait for each other.
    """

    def __init__(self, node: MPI.Intracomm, ranks: Sequence[int], patience: Patience) -> None:
        self._segment = Segment(node, LINE_BYTES)
        self._counters = [view[:8].view(np.int64) for view in self._segment.views]
        self._own = self._counters[node.rank]
        self._ranks = ranks
        self._patience = patience
        self._count = 0

    def meet(self, what: str) -> None:
        """Wait for the others; ``what`` is for a message.

        Raises:
            RanksLostError, HpctrainError: as of :meth:`hpctrain.comm.patience.Patience.wait`.
        """
        self._count += 1
        self._segment.sync()
        self._own[0] = self._count
        self._segment.sync()
        self._patience.wait(self._all_here, what, self._missing)
        self._segment.sync()

    def _all_here(self) -> bool:
        return all(counter[0] >= self._count for counter in self._counters)

    def _missing(self) -> list[int]:
        return [rank for rank, counter in zip(self._ranks, self._counters, strict=True) if counter[0] < self._count]

    def free(self) -> None:
        """Collective over the node."""
        self._counters = []
        self._own = np.empty(0, dtype=np.int64)
        self._segment.free()
