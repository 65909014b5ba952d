"""Memory that the ranks of a node share, with a barrier in it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, cast

import numpy as np
from numpy.typing import NDArray

from hpctrain.common.errors import HpctrainError
from hpctrain.worker.comm.shared.nodes import LocalNode
from hpctrain.worker.comm.timeout import Timeout

if TYPE_CHECKING:
    from mpi4py import MPI

Bytes = NDArray[np.uint8]
Pause = Callable[[], object]

# A cache line: a counter has one for itself, and slices of a buffer begin at one.
LINE_BYTES = 64
_LOOKS = 50


class Segment:
    """One buffer for each rank of a node, all of the same size. Creating and freeing it is collective over the node.

    In front of its buffer each rank has a counter of its barriers, and words for the others. Only that rank writes to
    them.

    Args:
        nbytes: the size of one rank's buffer.

    Attributes:
        views: the buffers of all local ranks, by local rank.
        own: this rank's buffer, zeroed at first.
        barriers: how many barriers this rank has begun.
        marks: two words of each local rank, for two barriers in turn; others load after a barrier what it stored.
    """

    def __init__(self, node: LocalNode, nbytes: int, timeout: Timeout) -> None:
        self._timeout = timeout
        self.barriers = 0
        with timeout.blocking("allocating shared memory"):
            self._allocate(node.comm, nbytes)

    def _allocate(self, comm: MPI.Intracomm, nbytes: int) -> None:
        from mpi4py import MPI

        # Each rank's part begins at a page, which the kernel places next to the core that writes to it first.
        room = LINE_BYTES + nbytes
        info = MPI.Info.Create({"alloc_shared_noncontig": "true"})
        try:
            self._window = MPI.Win.Allocate_shared(room, 1, info, comm)
        except MPI.Exception as error:
            # Open MPI 5.0 calls a full /dev/shm an internal error.
            if error.Get_error_class() not in (MPI.ERR_NO_MEM, MPI.ERR_NO_SPACE, MPI.ERR_RMA_SHARED, MPI.ERR_INTERN):
                raise
            raise HpctrainError(
                "HT-memory-not-available",
                "MPI has no {bytes} bytes of shared memory for each of {ranks} ranks on a node: {reason}",
                "`df -h /dev/shm` shows how much there is; --shm-size gives a container more",
                exit_code=1,
                bytes=nbytes,
                ranks=comm.size,
                reason=str(error),
            ) from error
        finally:
            info.Free()
        # One access epoch for its whole life: loads and stores go straight to memory, Sync orders them.
        self._window.Lock_all(MPI.MODE_NOCHECK)
        memories = [cast(memoryview, self._window.Shared_query(rank)[0]) for rank in range(comm.size)]
        memories = [memoryview(memory).cast("B") for memory in memories]
        self.views: list[Bytes] = [
            np.frombuffer(memory, dtype=np.uint8, count=nbytes, offset=LINE_BYTES) for memory in memories
        ]
        self.index = comm.rank
        self.own = self.views[comm.rank]
        self._counters = [memory[:8].cast("q") for memory in memories]
        self.marks = [memory[8:24].cast("q") for memory in memories]
        self._own_counter = self._counters.pop(comm.rank)
        self._sync = self._window.Sync
        self.own[:] = 0
        self._own_counter[0] = 0
        # No rank may read a counter before it is zeroed.
        self._window.Sync()
        comm.Barrier()
        self._window.Sync()

    @property
    def address(self) -> int:
        """The address of this rank's buffer."""
        return int(self.own.ctypes.data)

    def barrier(self, what: str, pause: Pause) -> None:
        """Wait until all ranks of the node have called this equally often.

        Every rank loads after the barrier what any of them stored into the segment before it, and no rank's load before
        the barrier sees what another stores after it. For ``MPI_Win_sync`` is a memory barrier where the memory model
        is unified, as it is for shared memory (MPI-4.1, section 12.7): 1. a rank's accesses to the segment come before
        its first ``Sync``, that before the store of its counter; 2. another rank's load that sees this count comes
        before its last ``Sync``, that before its accesses. The first ``Sync`` of the one and the last of the other are
        the pair that release and acquire are elsewhere. The counters lie in the window itself, so that one ``Sync``
        orders both. They only grow, and a counter is an aligned 64-bit word that is loaded and stored whole, so a load
        sees at worst an earlier count. No barrier is needed after the store of the counter: it becomes visible in time,
        and nothing depends on when.

        ``pause`` is called between two looks at the counters.
        """
        self.barriers = count = self.barriers + 1
        self._sync()
        self._own_counter[0] = count
        for counter in self._counters:
            # Read without a function call first: ranks in step arrive within a microsecond.
            for _ in range(_LOOKS):
                if counter[0] >= count:
                    break
                pause()
            else:
                arrived = functools.partial(_has_arrived, counter, count)
                self._timeout.wait(arrived, what, pause=pause)
        self._sync()

    def abandon(self) -> None:
        """Forget the memory without freeing it, which would take the ranks that died."""
        self.views = []
        self.own = np.empty(0, dtype=np.uint8)
        self._counters = []
        self.marks = []

    def free(self) -> None:
        """Free the memory. No view of it may be used afterwards."""
        self.abandon()
        self._own_counter.release()
        self._window.Unlock_all()
        self._window.Free()


def _has_arrived(counter: memoryview, count: int) -> bool:
    return bool(counter[0] >= count)
