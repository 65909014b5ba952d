"""One collective of a process group: the task of the group's worker, and torch.distributed's handle of it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from hpctrain.worker.comm.graph_errors import preserve_errors
from hpctrain.worker.comm.process_group.collectives import Collectives
from hpctrain.worker.comm.shared.segments import Pause
from hpctrain.worker.comm.shared.worker import Task, Worker

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
