"""The communicators, shared memory, threads and tasks of one process group, and torch.distributed's handles of them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from hpctrain.common.errors import HpctrainError
from hpctrain.worker.comm.graph_errors import preserve_errors
from hpctrain.worker.comm.process_group.collectives import Collectives
from hpctrain.worker.comm.process_group.messages import Messages
from hpctrain.worker.comm.process_group.staging import NodesOfRanks, StagingBuffers
from hpctrain.worker.comm.shared.nodes import LocalNode
from hpctrain.worker.comm.shared.segments import Pause
from hpctrain.worker.comm.shared.worker import Task, Worker, no_pause, sleep, threads_may_call_mpi
from hpctrain.worker.comm.timeout import Timeout

if TYPE_CHECKING:
    from mpi4py import MPI


_FORMING, _LEAVING = "forming a process group", "destroying a process group"


class GroupEngine:
    """The collectives and messages of one group. Making and freeing it is collective over the group.

    Each group has a queue and a thread of its own, so that a wait in one does not delay the others.

    Args:
        comm: the ranks of the group; the engine frees it.
        crowded: whether there are more ranks than cores, so that a waiting rank has to yield its core.
    """

    def __init__(self, comm: MPI.Intracomm, timeout: Timeout, *, crowded: bool) -> None:
        self.rank, self.size = comm.rank, comm.size
        self._timeout = timeout
        self._comm = comm
        with timeout.blocking(_FORMING):
            self._message_comm = comm.Dup()
            self._node = LocalNode(comm)
        self._beside = threads_may_call_mpi()
        pause = sleep if crowded else no_pause
        self._staging = StagingBuffers(self._node, timeout)
        numbers = self._node.numbers
        self._collectives = Collectives(
            comm, NodesOfRanks(comm.rank, self._node.homes), numbers, self._staging, timeout
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
        work = CollectiveWork(self._worker, self._collectives, what, body, outputs, small=small)
        self._worker.submit(work)
        return work

    def free(self) -> None:
        """Run the queued collectives, end the threads and free memory and communicators. Idempotent."""
        if self._freed:
            return
        self._freed = True
        self._worker.close()
        self.messages.close()
        self._timeout.finish(self._comm.Ibarrier, _LEAVING)
        with self._timeout.blocking(_LEAVING):
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


Body = Callable[[Collectives], None]


class CollectiveWork(dist.Work, Task):
    """One collective of a group, run once by its worker, and torch.distributed's handle of it.

    Waits end after ``HPCTRAIN_TIMEOUT``, whatever limit they are given. ``what`` names the collective in messages.
    """

    def __init__(
        self,
        worker: Worker,
        collectives: Collectives,
        what: str,
        body: Body,
        outputs: Sequence[torch.Tensor],
        *,
        small: bool,
    ) -> None:
        dist.Work.__init__(self)
        Task.__init__(self, worker, small=small, hurried=True)
        self._collectives = collectives
        self._what = what
        self._body: Body | None = body
        self._outputs = list(outputs)
        self._ending = threading.Lock()
        self._settled: Any = None
        self._future: Any = None

    def execute(self, pause: Pause) -> None:
        assert self._body is not None
        self._collectives.begin(self._what, pause)
        self._body(self._collectives)

    def end(self, error: BaseException | None) -> None:
        with self._ending:
            # Drops the references to tensors that it holds.
            self._body = None
            super().end(error)
            has_future = self._future is not None
        if has_future:
            self._settled.set_result(None)

    def wait(self, timeout: timedelta | None = None) -> bool:  # type: ignore[override]  # torch's
        Task.wait(self)
        return True

    def synchronize(self) -> None:
        Task.wait(self)

    def is_completed(self) -> bool:
        return self.done

    def is_success(self) -> bool:
        return self.done and self.error is None

    def exception(self) -> BaseException | None:
        return self.error

    def result(self) -> list[torch.Tensor]:
        return self._outputs

    def get_future(self) -> Any:
        """A ``torch.futures.Future`` that gets the outputs, or the error."""
        with self._ending:
            fresh = self._future is None
            if fresh:
                # An error that a callback raises is one of C++ too, where DDP waits; set_exception() is for Python's
                # own waits, and C++ would take the error for the outputs.
                self._settled = torch.futures.Future()
                self._future = self._settled.then(self._outcome)
            over = self.done
        if fresh and over:
            self._settled.set_result(None)
        return self._future

    @preserve_errors
    def _outcome(self, _: object) -> list[torch.Tensor]:
        if self.error:
            raise self.error
        return self._outputs
