"""The tasks of a process group, and torch.distributed's handles of them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from hpctrain.worker.comm.graph_errors import preserve_errors
from hpctrain.worker.comm.process_group.collectives import Collectives
from hpctrain.worker.comm.shared.segments import Pause

if TYPE_CHECKING:
    from hpctrain.worker.comm.shared.worker import Worker

Body = Callable[[Collectives], None]


class CollectiveTask:
    """One collective of a group, run once by its worker.

    Args:
        what: names the collective in messages; the same on all ranks.
        small: whether to run it at once in the submitting thread, if the queue is empty.
    """

    hurried = True

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
        self._worker = worker
        self._collectives = collectives
        self._what = what
        self._body: Body | None = body
        self.outputs = list(outputs)
        self.small = small
        self.done = True
        self.error: BaseException | None = None
        self._ending = threading.Lock()
        self._settled: Any = None
        self._future: Any = None

    def execute(self, pause: Pause) -> None:
        assert self._body is not None
        self._collectives.begin(self._what, pause)
        self._body(self._collectives)

    def end(self, error: BaseException | None) -> None:
        with self._ending:
            self.error = error
            # Drops the references to tensors that it holds.
            self._body = None
            self.done = True
            has_future = self._future is not None
        if has_future:
            self._settle()

    def wait(self) -> None:
        """Wait until the outputs are complete.

        Raises:
            RanksLostError: a rank died.
            HpctrainError: this collective failed, or one before it.
        """
        if not self.done:
            self._worker.run_up_to(self)
        if self.error:
            raise self.error

    def future(self) -> Any:
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
            self._settle()
        return self._future

    def _settle(self) -> None:
        self._settled.set_result(None)

    @preserve_errors
    def _outcome(self, _: object) -> list[torch.Tensor]:
        if self.error:
            raise self.error
        return self.outputs


class CollectiveWork(dist.Work):
    """The handle of a collective. Waits end after ``HPCTRAIN_TIMEOUT``, whatever limit they are given."""

    def __init__(self, task: CollectiveTask) -> None:
        super().__init__()
        self._task = task

    def wait(self, timeout: timedelta | None = None) -> bool:
        self._task.wait()
        return True

    def synchronize(self) -> None:
        self._task.wait()

    def is_completed(self) -> bool:
        return self._task.done

    def is_success(self) -> bool:
        return self._task.done and self._task.error is None

    def exception(self) -> BaseException | None:
        return self._task.error

    def result(self) -> list[torch.Tensor]:
        return self._task.outputs

    def get_future(self) -> Any:
        return self._task.future()
