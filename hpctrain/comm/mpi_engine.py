"""The communicator of the backend ``mpi``: gradients too travel by MPI, within a node through shared memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hpctrain.comm.mpi import MpiControl
from hpctrain.comm.shared.reducer import Reducer, Worker

if TYPE_CHECKING:
    from mpi4py import MPI

    from hpctrain.comm.shared.tensorflow_engine import MpiTensorFlowEngine
    from hpctrain.comm.shared.torch_engine import MpiTorchEngine


class MpiCommunicator(MpiControl):
    """Ranks started by MPI whose gradients hpctrain's own engine reduces."""

    backend = "mpi"

    def __init__(self, world: MPI.Intracomm, reason: str) -> None:
        super().__init__(world, reason)
        self._reducer = Reducer(self._world, self.patience)
        self._worker = Worker()

    def torch(self) -> MpiTorchEngine:
        from hpctrain.comm.shared.torch_engine import MpiTorchEngine

        return MpiTorchEngine(self, self._reducer, self._worker)

    def tensorflow(self) -> MpiTensorFlowEngine:
        from hpctrain.comm.shared.tensorflow_engine import MpiTensorFlowEngine

        return MpiTensorFlowEngine(self, self._reducer, self._worker)

    def shutdown(self) -> None:
        if self._comm is not None:
            self.barrier()
            self._worker.close()
            self._reducer.free()
        super().shutdown()
