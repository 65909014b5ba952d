"""The communicators, the shared memory and the threads of one process group."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from hpctrain.common.errors import HpctrainError
from hpctrain.worker.comm.process_group.collectives import Collectives
from hpctrain.worker.comm.process_group.messages import Messages
from hpctrain.worker.comm.process_group.nodes_of_ranks import NodesOfRanks
from hpctrain.worker.comm.process_group.staging import StagingBuffers
from hpctrain.worker.comm.process_group.work import Body, CollectiveTask, CollectiveWork
from hpctrain.worker.comm.shared.nodes import LocalNode
from hpctrain.worker.comm.shared.worker import Worker, no_pause, sleep, threads_may_call_mpi
from hpctrain.worker.comm.timeout import COLLECTIVE, Timeout

if TYPE_CHECKING:
    from mpi4py import MPI

_FORMING, _LEAVING = "forming a process group", "destroying a process group"


class GroupEngine:
    """The collectives and messages of one group. Making and freeing it is collective over the group.

    Each group has a queue and a thread of its own, so that a wait in one does not delay the others.

    Args:
        comm: the ranks of the group; the engine frees it.
        node_of: gives the node of a rank of the group; see :class:`~hpctrain.worker.comm.shared.nodes.LocalNode`.
        number: this rank's number in the run, for messages.
        crowded: whether there are more ranks than cores, so that a waiting rank has to yield its core.
    """

    def __init__(
        self,
        comm: MPI.Intracomm,
        timeout: Timeout,
        node_of: Callable[[int], int] | None,
        *,
        number: int,
        crowded: bool,
    ) -> None:
        self.rank, self.size = comm.rank, comm.size
        self._timeout = timeout
        self._comm = comm
        with timeout.blocking(_FORMING, COLLECTIVE):
            self._message_comm = comm.Dup()
            self._node = LocalNode(comm, node_of, number)
        self._beside = threads_may_call_mpi()
        pause = sleep if crowded else no_pause
        self._staging = StagingBuffers(self._node, timeout)
        numbers = self._node.numbers
        self._collectives = Collectives(
            comm, NodesOfRanks.of(comm.rank, self._node.homes), numbers, self._staging, timeout
        )
        self.messages = Messages(self._message_comm, numbers, timeout, pause, beside=self._beside)
        self._worker = Worker(beside=self._beside, closed=_used_after_free)
        self._worker.pause = pause
        self._freed = False

    def submit(self, what: str, body: Body, outputs: Sequence[torch.Tensor], *, asynchronous: bool) -> CollectiveWork:
        """Run a collective after those before it: in the caller's thread, or in the group's own if ``asynchronous``.

        ``what`` names the collective with its sizes, the same on all ranks; ``outputs`` are the tensors that it writes.
        """
        small = not (asynchronous and self._beside)
        task = CollectiveTask(self._worker, self._collectives, what, body, outputs, small=small)
        self._worker.submit(task)
        return CollectiveWork(task)

    def free(self) -> None:
        """Run the queued collectives, end the threads and free memory and communicators. Idempotent."""
        if self._freed:
            return
        self._freed = True
        self._worker.close()
        self.messages.close()
        self._timeout.finish(self._comm.Ibarrier, _LEAVING, kind=COLLECTIVE)
        with self._timeout.blocking(_LEAVING, COLLECTIVE):
            self._staging.free()
            self._node.free()
            self._message_comm.Free()
            self._comm.Free()


def _used_after_free() -> HpctrainError:
    return HpctrainError(
        "HT-group-destroyed",
        "a collective was called in a process group that was destroyed",
        "call destroy_process_group() and ht.shutdown() after the last collective",
        exit_code=1,
    )
