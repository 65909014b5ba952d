"""The mean over all ranks of a buffer in shared memory, and the thread that computes it beside other work."""

from __future__ import annotations

import threading
from collections import deque
from typing import TYPE_CHECKING, Any

import numpy as np

from hpctrain.comm.patience import Patience
from hpctrain.comm.shared.exchange import Exchange
from hpctrain.comm.shared.kernels import Adder, Array, cut
from hpctrain.comm.shared.nodes import Node
from hpctrain.comm.shared.segments import LINE_BYTES, Meeting, Segment

if TYPE_CHECKING:
    from mpi4py import MPI


class Reducer:
    """Reduces buffers of the ranks of ``world``, which all call the same methods in the same order.

    Args:
        world: the ranks; the reducer takes communicators of its own from it.
        patience: how they wait for each other.
    """

    def __init__(self, world: MPI.Intracomm, patience: Patience) -> None:
        self.node = Node(world)
        self._scale = 1.0 / world.size
        self._meeting = Meeting(self.node.comm, self.node.ranks, patience)
        self._exchange = Exchange(self.node.peers, patience) if self.node.peers and self.node.count > 1 else None
        self._adders: dict[np.dtype[Any], Adder] = {}
        self._segments: list[Segment] = []

    @property
    def sent_bytes(self) -> int:
        """What this rank handed to MPI for other nodes so far."""
        return self._exchange.sent_bytes if self._exchange else 0

    def allocate(self, nbytes: int) -> Segment:
        """Zeroed shared memory, which lives until :meth:`free`. Collective over the node."""
        segment = Segment(self.node.comm, nbytes)
        self._segments.append(segment)
        return segment

    def mean(self, segment: Segment, start: int, nbytes: int, dtype: np.dtype[Any], what: str) -> None:
        """Replace a part of every rank's buffer, ``nbytes`` from ``start`` on, by its mean over all ranks."""
        self._meeting.meet(what)
        if self.node.lane is not None:
            parts = cut(nbytes // dtype.itemsize, self.node.lanes, LINE_BYTES // dtype.itemsize)
            own = parts[self.node.lane]
            buffers = [view[start : start + nbytes].view(dtype)[own] for view in segment.views]
            self._slice_mean(buffers, self._adder(dtype), what)
        self._meeting.meet(what)

    def _slice_mean(self, buffers: list[Array], adder: Adder, what: str) -> None:
        if self._exchange is None:
            adder.mean(buffers, self._scale)
            return
        adder.sum(buffers)
        self._exchange.sum(buffers[0], what)
        self._spread(buffers, adder)

    def _spread(self, buffers: list[Array], adder: Adder) -> None:
        adder.sum(buffers[:1], self._scale)
        for other in buffers[1:]:
            np.copyto(other, buffers[0])

    def _adder(self, dtype: np.dtype[Any]) -> Adder:
        if dtype not in self._adders:
            self._adders[dtype] = Adder(dtype)
        return self._adders[dtype]

    def free(self) -> None:
        """Give the shared memory back. Collective over the run; no view may be used after it."""
        for segment in self._segments:
            segment.free()
        self._segments.clear()
        self._meeting.free()
        self.node.free()


class Task:
    """One reduction that was handed over. ``error`` is what went wrong in it."""

    def __init__(self, reducer: Reducer, segment: Segment, start: int, nbytes: int, dtype: np.dtype[Any], what: str):
        self._arguments = (segment, start, nbytes, dtype, what)
        self._reducer = reducer
        self.nbytes = nbytes
        self.done = False
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            self._reducer.mean(*self._arguments)
        except BaseException as error:
            self.error = error
        self.done = True


class Worker:
    """Runs tasks in the order in which they came: by a thread of its own while nobody waits, else by who waits.

    A thread that is about to wait has nothing better to do, and needs no hand-over. Small tasks are left to it: waking
    the thread costs more than they do.
    """

    _SMALL_BYTES = 65536

    def __init__(self) -> None:
        self._tasks: deque[Task] = deque()
        self._waiting = threading.Semaphore(0)
        # Whoever holds it takes the next task and runs it to its end.
        self._running = threading.Lock()
        self._closed = False
        self._thread = threading.Thread(target=self._serve, name="hpctrain-reducer", daemon=True)
        self._thread.start()

    def submit(self, task: Task) -> None:
        self._tasks.append(task)
        if task.nbytes > self._SMALL_BYTES:
            self._waiting.release()

    def wait(self, task: Task) -> None:
        """Return when the task is done.

        Raises:
            HpctrainError: it failed.
        """
        while not task.done:
            self._run_next(task)
        if task.error:
            raise task.error

    def close(self) -> None:
        """Run what is left, and end the thread."""
        while self._tasks:
            self._run_next(None)
        self._closed = True
        self._waiting.release()
        self._thread.join()

    def _run_next(self, wanted: Task | None) -> None:
        with self._running:
            if self._tasks and not (wanted and wanted.done):
                self._tasks.popleft().run()

    def _serve(self) -> None:
        while True:
            self._waiting.acquire()
            if self._closed:
                return
            self._run_next(None)
