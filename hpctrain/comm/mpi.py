"""The control plane over MPI: objects and small arrays between ranks, each wait with a limit.

Every collective is MPI's non-blocking one, polled, so that a rank which died or took another path is
reported after ``HPCTRAIN_TIMEOUT`` seconds instead of holding the others for ever.
"""

from __future__ import annotations

import pickle
from typing import TYPE_CHECKING, TypeVar

import numpy as np
from numpy.typing import NDArray

from hpctrain.comm.base import AnyArray, Communicator, Reduction
from hpctrain.comm.patience import Patience
from hpctrain.comm.stalls import RollCall
from hpctrain.errors import HpctrainError

if TYPE_CHECKING:
    from mpi4py import MPI

T = TypeVar("T")


class MpiControl(Communicator):
    """A communicator whose control plane is MPI. Its data plane is the subclass's."""

    def __init__(self, world: MPI.Intracomm, reason: str) -> None:
        from mpi4py import MPI

        super().__init__(reason)
        self._mpi = MPI
        # A copy of our own: messages can then never be taken for those of the user or of Horovod.
        self._comm: MPI.Intracomm | None = world.Dup()
        self.rank = self._comm.Get_rank()
        self.size = self._comm.Get_size()
        node = self._comm.Split_type(MPI.COMM_TYPE_SHARED, key=self.rank)
        self.local_rank = node.Get_rank()
        self.local_size = node.Get_size()
        node.Free()
        self.patience = Patience(f"rank {self.rank} on {self.host}")
        self._roll_call = RollCall(self._comm, self.patience, self.host) if self.size > 1 else None

    def barrier(self) -> None:
        self._wait(self._world.Ibarrier(), "barrier")

    def broadcast_object(self, value: T) -> T:
        payload = pickle.dumps(value) if self.rank == 0 else b""
        length = np.array([len(payload)], dtype=np.int64)
        self._wait(self._world.Ibcast(length, root=0), "broadcast")
        buffer = bytearray(payload) if self.rank == 0 else bytearray(int(length[0]))
        self._wait(self._world.Ibcast(buffer, root=0), "broadcast")
        return value if self.rank == 0 else pickle.loads(buffer)  # noqa: S301 - rank 0 of this very run

    def broadcast_bytes(self, buffer: NDArray[np.uint8]) -> None:
        """Overwrite ``buffer`` by rank 0's, in place."""
        self._wait(self._world.Ibcast(buffer, root=0), "broadcast")

    def allgather_object(self, value: T) -> list[T]:
        payload = pickle.dumps(value)
        lengths = np.empty(self.size, dtype=np.int64)
        own = np.array([len(payload)], dtype=np.int64)
        self._wait(self._world.Iallgather(own, lengths), "allgather")
        joined = bytearray(int(lengths.sum()))
        starts = np.concatenate(([0], np.cumsum(lengths)[:-1]))
        self._wait(
            self._world.Iallgatherv(payload, [joined, lengths, starts, self._mpi.BYTE]),
            "allgather",
        )
        view = memoryview(joined)
        parts = zip(starts, lengths, strict=True)
        return [pickle.loads(view[start : start + length]) for start, length in parts]  # noqa: S301

    def allreduce(self, array: AnyArray, reduction: Reduction = "mean") -> AnyArray:
        sent = np.asarray(array, order="C")  # ascontiguousarray would give a number a dimension
        received = np.empty_like(sent)
        operation = {"min": self._mpi.MIN, "max": self._mpi.MAX}.get(reduction, self._mpi.SUM)
        self._wait(self._world.Iallreduce(sent, received, op=operation), f"allreduce ({reduction})")
        return received / self.size if reduction == "mean" else received

    def abort(self, exit_code: int) -> None:
        self._mpi.COMM_WORLD.Abort(exit_code)

    def shutdown(self) -> None:
        if self._roll_call is not None:
            self._roll_call.close()
            self._roll_call = None
        if self._comm is not None:
            self._comm.Free()
            self._comm = None

    @property
    def _world(self) -> MPI.Intracomm:
        if self._comm is None:
            raise HpctrainError("the communicator was used after shutdown()")
        return self._comm

    def _wait(self, request: MPI.Request, what: str) -> None:
        self.patience.wait(request.Test, what)
