"""The communicators over MPI: the control plane, with a limit on each wait, and the backend ``mpi`` on top of it.

Every collective is MPI's non-blocking one, polled, so that no wait for a rank that died is endless.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

import numpy as np

from hpctrain.common.bucket_groups import mpi_bucket_bytes
from hpctrain.common.errors import HpctrainError
from hpctrain.common.run.stopping import RESUMABLE
from hpctrain.worker.comm.base import SUMMING, AnyArray, Group, LostRank, RanksLostError, Reduction
from hpctrain.worker.comm.boards import MpiBoard
from hpctrain.worker.comm.control import Bytes, CheckedControl, Words
from hpctrain.worker.comm.mpi_collectives import allgather_bytes, broadcast, duplicate
from hpctrain.worker.comm.parameter_server import ParameterServer
from hpctrain.worker.comm.shared.reducer import Reducer
from hpctrain.worker.comm.survival import Survival, is_majority, missing_mitigation
from hpctrain.worker.comm.timeout import Timeout

if TYPE_CHECKING:
    from mpi4py import MPI

    from hpctrain.worker.comm.process_group.backend import Groups
    from hpctrain.worker.comm.shared.tensorflow_engine import MpiTensorFlowEngine
    from hpctrain.worker.comm.shared.torch_engine import MpiTorchEngine


class MpiGroup(Group):
    """A group of ``size`` neighbouring ranks on an MPI communicator of its own; ``what`` names its sums in messages."""

    def __init__(self, world: MPI.Intracomm, timeout: Timeout, size: int, what: str) -> None:
        self._timeout = timeout
        self._what = what
        # The split cannot be polled, but the ranks have just met, so it ends soon.
        with timeout.blocking("forming groups of ranks"):
            self._comm = cast("MPI.Intracomm", world.Split(world.rank // size, world.rank))
        super().__init__(self._comm.rank, size)

    def allreduce(self, array: AnyArray) -> AnyArray:
        sent = np.asarray(array, order="C")
        received = np.empty_like(sent)
        self._timeout.finish(lambda: self._comm.Iallreduce(sent, received), self._what)
        return received

    def free(self) -> None:
        """Free the communicator, on all ranks of the group together."""
        self._comm.Free()


class MpiControl(CheckedControl):
    """A communicator whose control plane is MPI. The subclass adds the data plane."""

    def __init__(self, world: MPI.Intracomm, reason: str) -> None:
        from mpi4py import MPI

        super().__init__(reason)
        self._mpi = MPI
        self.measures_links = True
        self.rank, self.size = world.Get_rank(), world.Get_size()
        self.timeout = Timeout(f"rank {self.rank} on {self.host}")
        # On a communicator of its own, messages cannot be mistaken for those of the user or of Horovod.
        self._comm: MPI.Intracomm | None = duplicate(world, self.timeout, "joining the run")
        self._groups: list[MpiGroup] = []
        self._board: MpiBoard | None = None
        try:
            self._begin(self._comm)
        except BaseException:
            self._leave()
            raise

    def _begin(self, comm: MPI.Intracomm) -> None:
        """Begin to watch waits, and find the ranks of this host. Collective."""
        self.rank, self.size = comm.Get_rank(), comm.Get_size()
        if self.size > 1:
            self._board = MpiBoard(comm, self.timeout)
            self._watch_waits(self._board)
        else:
            self._watch_no_more()
            self._board = None
        with self.timeout.blocking("finding the ranks of this host"):
            node = comm.Split_type(self._mpi.COMM_TYPE_SHARED, key=self.rank)
        self.local_rank = node.Get_rank()
        self.local_size = node.Get_size()
        node.Free()

    def _maximum(self, words: Words, what: str) -> None:
        self.timeout.finish(lambda: self._world.Iallreduce(self._mpi.IN_PLACE, words, op=self._mpi.MAX), what)

    def _overwrite(self, buffer: Bytes, root: int, what: str) -> None:
        broadcast(self._world, self.timeout, buffer, root, what)

    def _gather(self, own: Bytes, longest: int, what: str) -> Sequence[Bytes]:
        return allgather_bytes(self._world, self.timeout, own, longest, what)

    def _reduce(self, array: AnyArray, reduction: Reduction, what: str) -> AnyArray:
        received = np.empty_like(array)
        operation = {"min": self._mpi.MIN, "max": self._mpi.MAX}.get(reduction, self._mpi.SUM)
        self.timeout.finish(lambda: self._world.Iallreduce(array, received, op=operation), what)
        return received

    def seconds_of_message(self, target: int, source: int, nbytes: int) -> float:
        sent, received = np.ones((2, nbytes), np.uint8)
        begin = time.perf_counter()
        under_way = [self._world.Irecv(received, source)]
        try:
            under_way.append(self._world.Isend(sent, target))
        except Exception:
            self.timeout.abandon(under_way)
            raise
        self.timeout.wait(under_way[0].Test, "measuring links", keep=under_way)
        seconds = time.perf_counter() - begin
        self.timeout.wait(under_way[1].Test, "measuring links", keep=under_way)
        return seconds

    def group(self, size: int | None = None, what: str = SUMMING) -> MpiGroup:
        self._meet(f"groups of {size or self.size} ranks", "forming groups of ranks")
        self._groups.append(MpiGroup(self._world, self.timeout, size or self.size, what))
        return self._groups[-1]

    def shutdown(self) -> None:
        try:
            self._free()
        finally:
            self._leave()

    def _free(self) -> None:
        """Free what all ranks have to free together. Collective."""
        if self._board is not None and self._watch is not None:
            self._board.close(self.timeout, self._watch.stop)
        while self._groups:
            self._groups.pop().free()
        if self._comm is not None:
            self._comm.Free()

    def _leave(self) -> None:
        """Leave the run without the other ranks. Idempotent."""
        self._watch_no_more()
        self._comm = self._board = None

    @property
    def _world(self) -> MPI.Intracomm:
        if self._comm is None:
            raise HpctrainError("HT-communicator-after-shutdown", "the communicator was used after shutdown()")
        return self._comm


class MpiCommunicator(MpiControl):
    """Ranks started by MPI whose gradients hpctrain's own engine reduces."""

    backend = "mpi"
    in_host_memory = True
    _survival: Survival | None = None
    # The ranks since the run was formed or re-formed, as Survival has them.
    _members: Sequence[tuple[int, str]] = ()

    def __init__(self, world: MPI.Intracomm, reason: str) -> None:
        super().__init__(world, reason)
        self._reducer = Reducer(self._world, self.timeout, threads=_threads())
        # One engine per framework for all models: what it knows about buffers stays valid as long as the reducer.
        self._torch: MpiTorchEngine | None = None
        self._tensorflow: MpiTensorFlowEngine | None = None
        self._process_groups: Groups | None = None
        self._servers: list[ParameterServer] = []

    def _begin(self, comm: MPI.Intracomm) -> None:
        if self._survival is None and missing_mitigation() is None:
            self._members = list(enumerate(self.allgather_object(self.host)))
            self._survival = self.timeout.survival = Survival(comm, self._members)
        super()._begin(comm)

    @property
    def bucket_bytes(self) -> float:
        node = self._reducer.node
        return mpi_bucket_bytes(hosts=node.count, local=node.lanes, rdma=node.rdma)

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

    def shutdown(self) -> None:
        # The work is done, and what cannot be freed without ranks that died ends with the process.
        with contextlib.suppress(RanksLostError):
            super().shutdown()

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

    # Ranks that die.

    def lacks_for_fault_tolerance(self) -> str:
        return missing_mitigation() or ""

    @property
    def fault_tolerant(self) -> bool:
        return self._survival is not None

    @property
    def lost(self) -> bool:
        return self._survival is not None and self._survival.lost

    def agree(self) -> None:
        if self._survival:
            self._survival.agree(self.timeout)
        else:
            self.barrier()

    def recover(self) -> tuple[LostRank, ...]:
        survival = self._survival
        assert survival is not None
        if self._process_groups is not None:
            raise HpctrainError(
                "HT-run-not-re-formed",
                "rank {rank} on {host}: a rank died, and its part of what process groups divide is lost",
                "hpctrain run --resume continues from the last checkpoint",
                exit_code=RESUMABLE,
                rank=self.rank,
                host=self.host,
            )
        survival.begin()
        try:
            self._re_form(survival)
        finally:
            survival.end()
        before, self._members = self._members, survival.members
        self._require_majority([host for _, host in before], [host for _, host in self._members])
        return tuple(
            LostRank(rank=rank, first_rank=member[0], host=member[1])
            for rank, member in enumerate(before)
            if member not in self._members
        )

    def _re_form(self, survival: Survival) -> None:
        # Live ranks may wait in the data plane for one that has left it.
        self._reducer.revoke()
        survival.give_up(self.timeout)
        with self.timeout.blocking("re-forming the run without the ranks that died"):
            survival.shrink()
        self._comm = survival.comm
        # Freeing a communicator takes all of its ranks, the dead ones too.
        self._groups.clear()
        self._kept_groups.clear()
        try:
            self._begin(survival.comm)
            survival.agree(self.timeout)
            self._reducer.rebuild(survival.comm)
            survival.agree(self.timeout)
        except self._mpi.Exception as error:
            survival.explain(error)
            raise

    def _require_majority(self, before: Sequence[str], left: Sequence[str]) -> None:
        if is_majority(before, left):
            return
        raise HpctrainError(
            "HT-hosts-no-majority",
            "rank {rank} on {host}: {gone} fell silent, and {left} of {before} hosts is not a majority: "
            "the others may still be training",
            "hpctrain run --resume continues from the last checkpoint, on the hosts that answer",
            exit_code=RESUMABLE,
            rank=self._first_rank,
            host=self.host,
            gone=", ".join(sorted(set(before) - set(left))),
            left=len(set(left)),
            before=len(set(before)),
        )


def _threads() -> int:
    """The number of threads in OMP_NUM_THREADS, which may be a list for nested loops: then its first number."""
    first = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0]
    return int(first) if first.isdigit() and int(first) > 0 else 1
