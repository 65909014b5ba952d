"""Computes the mean over all ranks of buffers in shared memory, in a thread beside other work."""

from __future__ import annotations

import bisect
import os
from typing import TYPE_CHECKING, Any

import numpy as np

from hpctrain.common.errors import HpctrainError
from hpctrain.worker.comm.shared.exchange import RDMA_MESSAGE_BYTES, TCP_MESSAGE_BYTES, Exchange
from hpctrain.worker.comm.shared.kernels import ThreadPool
from hpctrain.worker.comm.shared.means import Buffer, Mean, mean_at_once, mean_by_slices
from hpctrain.worker.comm.shared.nodes import LocalNode
from hpctrain.worker.comm.shared.segments import Bytes, Pause, Segment
from hpctrain.worker.comm.shared.worker import Task, Worker, no_pause, threads_may_call_mpi
from hpctrain.worker.comm.timeout import Timeout

if TYPE_CHECKING:
    from mpi4py import MPI

# Up to this size it is faster if every rank adds up everything than if each adds up a slice, and if the reduction
# runs in the thread that submits it.
_AT_ONCE_BYTES = 16384
# Up to this size a reduction runs in the thread that waits for it: waking another costs as much as the reduction.
_UNHURRIED_BYTES = 1_000_000


class Reducer:
    """Reduces buffers of the ranks of ``world``, which all submit the same buffers in the same order.

    ``threads`` is how many threads this rank may use for sums.
    """

    def __init__(self, world: MPI.Intracomm, timeout: Timeout, *, threads: int) -> None:
        self._timeout = timeout
        self._threads = ThreadPool(threads)
        self.worker = Worker(beside=threads_may_call_mpi(), closed=_after_shutdown)
        self._closed = False
        self._tables: list[dict[Any, Any]] = []
        self._connect(world)

    def _connect(self, world: MPI.Intracomm) -> None:
        with self._timeout.blocking("setting up the reduction of gradients"):
            self._world = world.Dup()
            self.node = LocalNode(world)
        peers = self.node.peers if self.node.count > 1 else None
        message_bytes = RDMA_MESSAGE_BYTES if self.node.rdma else TCP_MESSAGE_BYTES
        self._exchange = Exchange(peers, self._timeout, message_bytes) if peers else None
        self._agreed: set[str] = set()
        # By address, in the order of allocation, which is the same on all ranks.
        self._segments: dict[int, Segment] = {}
        self._addresses: list[int] = []
        self._small: dict[int, str] = {}
        self._slots = Segment(self.node, 2 * _AT_ONCE_BYTES, self._timeout)
        self.worker.pause = os.sched_yield if self.node.crowded else no_pause

    @property
    def sent_bytes(self) -> int:
        """The bytes that this rank has sent to other nodes through MPI so far."""
        return self._exchange.sent_bytes if self._exchange else 0

    def allocate(self, nbytes: int) -> Segment:
        """Allocate zeroed shared memory, which lives until :meth:`free`. Collective over the node."""
        self._check_open()
        segment = Segment(self.node, nbytes, self._timeout)
        bisect.insort(self._addresses, segment.address)
        self._segments[segment.address] = segment
        return segment

    def stage(
        self, nbytes: int, dtype: np.dtype[Any], name: str, wire: np.dtype[Any] | None = None
    ) -> tuple[Bytes, ReductionTask]:
        """Allocate shared memory for copies of a buffer elsewhere, and make their reduction. Collective over the run.

        The ranks agree on the buffer before they allocate, after queued reductions, which may need an agreement too.
        """
        self._check_open()
        self.worker.drain()
        self._agree(f"{name!r} ({nbytes} bytes of {dtype})")
        segment = self.allocate(nbytes)
        return segment.own, ReductionTask(self, segment, 0, nbytes, dtype, name, wire)

    def table(self) -> dict[Any, Any]:
        """An empty dictionary for facts about segments; :meth:`rebuild` and :meth:`free` clear it."""
        self._tables.append({})
        return self._tables[-1]

    def find(self, address: int, nbytes: int) -> tuple[Segment, int] | None:
        """The segment that contains this rank's buffer, and the offset in it."""
        self._check_open()
        index = bisect.bisect(self._addresses, address) - 1
        if index < 0:
            return None
        start = address - self._addresses[index]
        segment = self._segments[self._addresses[index]]
        return (segment, start) if start + nbytes <= len(segment.own) else None

    def prepare(self, buffer: Buffer) -> Mean:
        """A function that replaces a buffer by its mean. Collective for the first buffer of each name and size."""
        self._agree(str(buffer))
        if self.node.count == 1 and buffer.nbytes <= _AT_ONCE_BYTES:
            return mean_at_once(buffer, self._slots, self._world.size, self._small)
        return mean_by_slices(buffer, self.node, self._exchange, self._threads, self._world.size)

    def _agree(self, description: str) -> None:
        if description in self._agreed:
            return
        own = np.frombuffer(description.encode()[:256].ljust(256), dtype=np.uint8)
        everyone = np.empty((self._world.size, 256), dtype=np.uint8)
        what = f"agreeing on {description}"
        self._timeout.finish(lambda: self._world.Iallgather(own, everyone), what)
        for rank, theirs in enumerate(everyone):
            if (theirs != everyone[0]).any():
                first, other = (row.tobytes().decode(errors="replace").strip() for row in (everyone[0], theirs))
                numbers = self.node.numbers
                raise HpctrainError(
                    "HT-ranks-reduce-differently",
                    "rank {rank} reduces {other} where rank {first_rank} reduces {first}",
                    "build the same model on every rank, and make the same calls of ht.distribute and backward()",
                    exit_code=1,
                    rank=numbers[rank],
                    other=other,
                    first_rank=numbers[0],
                    first=first,
                )
        self._agreed.add(description)

    def revoke(self) -> None:
        """Make the ranks' waits for each other fail on all of them, because a rank died."""
        for comm in (self._world, self.node.comm, self.node.peers):
            if comm is not None:
                comm.Revoke()

    def rebuild(self, world: MPI.Intracomm) -> None:
        """Continue with ``world``, the remaining ranks: discard the queue and all buffers.

        Freeing windows and communicators takes all of their ranks, the dead ones too, so their memory stays until exit.
        Collective over ``world``. Threads that waited for a reduction have got their error before.
        """
        self.worker.reset()
        for segment in self._segments.values():
            segment.abandon()
        self._forget()
        self._connect(world)

    def _forget(self) -> None:
        """Forget all segments, so that nothing finds a buffer that is gone."""
        self._segments.clear()
        self._addresses.clear()
        for table in self._tables:
            table.clear()

    def close(self) -> None:
        """Run the queued reductions, unless one failed, and end the threads. Idempotent."""
        self._closed = True
        self.worker.close()
        self._threads.close()

    def _check_open(self) -> None:
        if self._closed:
            raise _after_shutdown()

    def free(self) -> None:
        """After :meth:`close`, free the shared memory. Collective over the run; no view may be used after it."""
        with self._timeout.blocking("giving shared memory back"):
            for segment in self._segments.values():
                segment.free()
            self._forget()
            self._slots.free()
            self.node.free()
            self._world.Free()


class ReductionTask(Task):
    """The reduction of a buffer, to be submitted once or many times, and prepared at its first run."""

    def __init__(
        self,
        reducer: Reducer,
        segment: Segment,
        start: int,
        nbytes: int,
        dtype: np.dtype[Any],
        name: str,
        wire: np.dtype[Any] | None = None,
    ) -> None:
        super().__init__(reducer.worker, small=nbytes <= _AT_ONCE_BYTES, hurried=nbytes > _UNHURRIED_BYTES)
        if wire is None or wire.itemsize >= dtype.itemsize:
            wire = dtype
        self._buffer = Buffer(segment=segment, start=start, nbytes=nbytes, dtype=dtype, wire=wire, name=name)
        self._reducer = reducer
        self.run: Mean = self._prepare

    def _prepare(self, pause: Pause) -> None:
        # Prepared only now, in the order of the reductions, because this is collective too.
        self.run = self._reducer.prepare(self._buffer)
        self.run(pause)

    def execute(self, pause: Pause) -> None:
        self.run(pause)


def _after_shutdown() -> HpctrainError:
    return HpctrainError(
        "HT-reduction-after-shutdown",
        "gradients were reduced after ht.shutdown()",
        "call ht.shutdown() after the last update",
        exit_code=1,
    )
