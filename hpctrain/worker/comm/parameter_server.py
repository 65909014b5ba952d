"""A parameter server without a server process: a vector in MPI windows of all ranks, a part in each.

Every rank reads and adds to it by one-sided calls, whether or not the others are in MPI at the time (within a node;
between nodes it depends on the network and MPI's component for it). All access is by accumulating calls, which MPI
makes atomic element by element, so no addition is lost and no torn number is read. A vector that is read while others
add to it may contain an addition in some of its elements only, as in Dean et al. 2012.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, cast

import numpy as np
from numpy.typing import NDArray

from hpctrain.worker.comm.timeout import Timeout

if TYPE_CHECKING:
    from mpi4py import MPI

Vector = NDArray[np.float32]
_Words = NDArray[np.int64]

# Step numbers above any real one: the next number after close(), and the one of a rank that computes no step.
_CLOSED = 2**40
_IDLE = 2**60
# The words in rank 0's window: the number of the next step, then the step that each rank computes.
_NEXT, _FIRST_RANK = 0, 1
_NAME = "the parameter server"


class ParameterServer:
    """A vector of float32, and the numbers of the steps that are computed with it. Creating it is collective."""

    def __init__(self, comm: MPI.Intracomm, timeout: Timeout, length: int) -> None:
        from mpi4py import MPI

        self._mpi = MPI
        self._comm = comm
        self._timeout = timeout
        ends = [length * rank // comm.size for rank in range(comm.size + 1)]
        self._length = length
        self._parts = [slice(begin, end) for begin, end in itertools.pairwise(ends)]
        own = self._parts[comm.rank]
        # The calls that make windows cannot be polled, but the ranks have just met, so they end soon.
        with timeout.blocking("opening the parameter server"):
            self._vector = MPI.Win.Allocate((own.stop - own.start) * 4, 4, comm=comm)
            self._words = MPI.Win.Allocate((_FIRST_RANK + comm.size) * 8 if comm.rank == 0 else 0, 8, comm=comm)
            self._vector.Lock_all()
            self._words.Lock_all()

    def begin(self, vector: Vector, *, staleness: int) -> None:
        """Set the vector, equal on all ranks, and number the steps from 0. Collective.

        A rank may be ``staleness`` steps ahead of the slowest one; see :meth:`begin_step`.
        """
        self._staleness = staleness
        self._timeout.finish(self._comm.Ibarrier, "beginning with the parameter server")
        np.frombuffer(cast(memoryview, self._vector.tomemory()), np.float32)[:] = vector[self._parts[self._comm.rank]]
        if self._comm.rank == 0:
            np.frombuffer(cast(memoryview, self._words.tomemory()), np.int64)[:] = 0
        self._vector.Sync()
        self._words.Sync()
        self._timeout.finish(self._comm.Ibarrier, "beginning with the parameter server")

    def add(self, change: Vector) -> Vector:
        """Add to the vector; returns its value just before."""
        return self._accumulate(np.ascontiguousarray(change, np.float32), self._mpi.SUM)

    def push(self, change: Vector) -> None:
        """Add to the vector, without reading it; this rank's later reads include the change."""
        change = np.ascontiguousarray(change, np.float32)
        self._wait_all(
            [
                self._vector.Raccumulate(change[part], rank, op=self._mpi.SUM)
                for rank, part in enumerate(self._parts)
                if part.stop > part.start
            ]
        )

    def read(self) -> Vector:
        """The vector."""
        return self._accumulate(np.zeros(self._length, np.float32), self._mpi.NO_OP)

    def take_step(self) -> int | None:
        """The number of a step that no other rank has; None after :meth:`close`."""
        number = int(self._word(_NEXT, 1, self._mpi.SUM)[0])
        return number if number < _CLOSED else None

    def close(self) -> None:
        """Make :meth:`take_step` return None on every rank."""
        self._word(_NEXT, _CLOSED, self._mpi.SUM)

    def begin_step(self, number: int) -> None:
        """Announce the step that this rank computes, and wait until no other rank is too far behind it."""
        self._word(_FIRST_RANK + self._comm.rank, number, self._mpi.REPLACE)
        self._timeout.wait(
            lambda: not self._behind(number),
            f"step {number + 1} of the epoch, which waits for steps that are more than {self._staleness} before it",
        )

    def end(self) -> None:
        """Complete this rank's additions, and announce that it computes no more steps."""
        with self._timeout.blocking(f"adding the last changes to {_NAME}"):
            self._vector.Flush_all()
        self._word(_FIRST_RANK + self._comm.rank, _IDLE, self._mpi.REPLACE)

    def free(self) -> None:
        """Free the windows. Collective."""
        for window in (self._vector, self._words):
            window.Unlock_all()
            window.Free()

    def _behind(self, number: int) -> bool:
        """Whether a rank's step is too far behind this one."""
        words = np.empty(self._comm.size, np.int64)
        nothing = np.zeros_like(words)
        request = self._words.Rget_accumulate(nothing, words, 0, target=(_FIRST_RANK,), op=self._mpi.NO_OP)
        self._timeout.wait(request.Test, _NAME)
        return bool((words < number - self._staleness).any())

    def _accumulate(self, values: Vector, operation: MPI.Op) -> Vector:
        before = np.empty_like(values)
        requests = [
            self._vector.Rget_accumulate(values[part], before[part], rank, op=operation)
            for rank, part in enumerate(self._parts)
            if part.stop > part.start
        ]
        self._wait_all(requests)
        return before

    def _word(self, place: int, value: int, operation: MPI.Op) -> _Words:
        given, before = np.array([value], np.int64), np.empty(1, np.int64)
        self._wait_all([self._words.Rget_accumulate(given, before, 0, target=(place,), op=operation)])
        return before

    def _wait_all(self, requests: list[MPI.Request]) -> None:
        self._timeout.wait(lambda: self._mpi.Request.Testall(requests), _NAME, keep=requests)
