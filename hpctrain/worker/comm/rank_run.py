"""What belongs to the run of this rank: one object, that ``ht.init`` fills and ``ht.shutdown`` empties."""

from __future__ import annotations

import atexit
import contextlib
import os
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn

from hpctrain.worker.comm.rank_times import RankTimes

if TYPE_CHECKING:
    from hpctrain.worker.comm.base import Communicator

ExceptionHook = Callable[[type[BaseException], BaseException, TracebackType | None], object]


@dataclass(kw_only=True)
class Run:
    """The run of this process, and what it knows of others that it was in.

    Attributes:
        comm: its communicator, from ``ht.init`` to ``ht.shutdown``.
        batches: the data ranks of the batches that were divided last.
        groups: what makes torch.distributed's groups of the backend ``hpctrain``.
        models: the Keras models that ``ht.distribute`` got.
        recording: records the script in the events of its run.
        joined: whether the process has ever joined a run.
        distributed: whether it has trained with the other ranks of one.
        knows_others: whether the script has imported a library by which ranks train together without hpctrain.
        ends_ranks: whether the program that runs this script ends every rank where one raises an exception.
        replaced_hook: the exception hook that ``ht.init`` replaced.
        times: where the time of its steps goes.
    """

    comm: Communicator | None = None
    batches: Any = None
    groups: Any = None
    models: weakref.WeakSet[Any] = field(default_factory=weakref.WeakSet)
    recording: Any = None
    joined: bool = False
    distributed: bool = False
    knows_others: bool = False
    ends_ranks: bool = False
    replaced_hook: ExceptionHook | None = None
    times: RankTimes = field(default_factory=RankTimes)
    _leave: Callable[[], None] | None = None

    def end(self) -> Communicator | None:
        """Forget what ends with the run; returns its communicator."""
        left, self.comm = self.comm, None
        self.batches = self.groups = None
        self.times = RankTimes()
        return left

    # At the interpreter's exit. Handlers run in the reverse order of their registration, so that this one is registered
    # again after each library that has one of its own.

    def leave_at_exit(self, leave: Callable[[], None]) -> None:
        """Call ``leave`` at the interpreter's exit, before all handlers registered so far. Idempotent."""
        self._leave = leave
        self.leave_first()

    def leave_first(self) -> None:
        """Register the handler of :meth:`leave_at_exit`, if any, again, so that it runs before all others."""
        if self._leave is not None:
            atexit.unregister(self._leave)
            atexit.register(self._leave)

    def leave_no_more(self) -> None:
        """Leave the run no more at the interpreter's exit, in a rank that failed: leaving waits for the others."""
        if self._leave is not None:
            atexit.unregister(self._leave)


run = Run()


def end_job(exit_code: int) -> NoReturn:
    """End every rank at once, since the others may wait for this one in a collective for ever."""
    with contextlib.suppress(ImportError, RuntimeError):
        import mpi4py

        # Importing MPI must not start it, which would wait for ranks that never do.
        mpi4py.rc.initialize = False
        from mpi4py import MPI

        if MPI.Is_initialized() and not MPI.Is_finalized():
            MPI.COMM_WORLD.Abort(exit_code)
    # Not sys.exit: exit handlers would shut down MPI and Horovod, and wait for the other ranks to do the same.
    # torchrun acts on the exit status.
    os._exit(exit_code)
