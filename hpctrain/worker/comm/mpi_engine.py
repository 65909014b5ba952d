"""The communicator of the backend ``mpi``: gradients also travel by MPI, and through shared memory within a node."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from hpctrain.common.bucket_groups import mpi_bucket_bytes
from hpctrain.common.errors import HpctrainError
from hpctrain.common.run.stopping import RESUMABLE
from hpctrain.worker.comm.mpi import MpiControl
from hpctrain.worker.comm.parameter_server import ParameterServer
from hpctrain.worker.comm.shared.reducer import Reducer
from hpctrain.worker.comm.survival import missing_mitigation

if TYPE_CHECKING:
    from mpi4py import MPI

    from hpctrain.worker.comm.base import LostRank
    from hpctrain.worker.comm.process_group.backend import Groups
    from hpctrain.worker.comm.shared.tensorflow_engine import MpiTensorFlowEngine
    from hpctrain.worker.comm.shared.torch_engine import MpiTorchEngine


class MpiCommunicator(MpiControl):
    """Ranks started by MPI whose gradients hpctrain's own engine reduces."""

    backend = "mpi"
    rebuildable = True
    in_host_memory = True

    def __init__(self, world: MPI.Intracomm, reason: str) -> None:
        super().__init__(world, reason)
        self._reducer = Reducer(self._world, self.timeout, threads=_threads())
        # One engine per framework for all models: what it knows about buffers stays valid as long as the reducer.
        self._torch: MpiTorchEngine | None = None
        self._tensorflow: MpiTensorFlowEngine | None = None
        self._process_groups: Groups | None = None
        self._servers: list[ParameterServer] = []

    @property
    def bucket_bytes(self) -> float:
        node = self._reducer.node
        return mpi_bucket_bytes(hosts=node.count, local=node.lanes, rdma=node.rdma)

    def lacks_for_fault_tolerance(self) -> str:
        return missing_mitigation() or ""

    def torch(self) -> MpiTorchEngine:
        from hpctrain.worker.comm.shared.torch_engine import MpiTorchEngine

        if self._torch is None:
            self._torch = MpiTorchEngine(self, self._reducer)
        return self._torch

    def tensorflow(self) -> MpiTensorFlowEngine:
        from hpctrain.worker.comm.shared.tensorflow_engine import MpiTensorFlowEngine

        if self._tensorflow is None:
            self._tensorflow = MpiTensorFlowEngine(self, self._reducer)
        return self._tensorflow

    def _process_group(self) -> None:
        self.process_groups().join()

    def process_groups(self) -> Groups:
        """Make torch.distributed's backend ``hpctrain`` available, and return its groups. Collective."""
        from hpctrain.worker.comm.process_group.backend import Groups

        if self._process_groups is None:
            self._meet("process groups", "forming a process group")
            self._process_groups = Groups(self._world, self.timeout, self.host, crowded=self._reducer.node.crowded)
        return self._process_groups

    def parameter_server(self, length: int) -> ParameterServer:
        self._meet(f"a parameter server of {length}", "opening the parameter server")
        self._servers.append(ParameterServer(self._world, self.timeout, length))
        return self._servers[-1]

    def watch_numbers(self) -> None:
        self._reducer.checks_finite = True

    def recover(self) -> tuple[LostRank, ...]:
        if self._process_groups is not None:
            raise HpctrainError(
                "HT-run-not-re-formed",
                "rank {rank} on {host}: a rank died, and its part of what process groups divide is lost",
                "hpctrain run --resume continues from the last checkpoint",
                exit_code=RESUMABLE,
                rank=self.rank,
                host=self.host,
            )
        return super().recover()

    def _revoke(self) -> None:
        self._reducer.revoke()

    def _rebuild(self, comm: MPI.Intracomm) -> None:
        self._reducer.rebuild(comm)

    def _free(self) -> None:
        if self._comm is not None:
            self._leave_memory()
            if self._process_groups is not None:
                self._process_groups.free()
                self._process_groups = None
            # Where this fails, a rank is gone and nothing can be freed: the end of the process frees it.
            self._reducer.close()
            self.barrier()
            self._reducer.free()
            while self._servers:
                self._servers.pop().free()
        super()._free()


def _threads() -> int:
    """The number of threads in OMP_NUM_THREADS, which may be a list for nested loops: then its first number."""
    first = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0]
    return int(first) if first.isdigit() and int(first) > 0 else 1
