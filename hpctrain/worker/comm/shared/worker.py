"""Runs tasks of a rank in their order, in a thread beside other work or in the thread that waits for them."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Protocol

from hpctrain.common.errors import HpctrainError
from hpctrain.worker.comm import forks
from hpctrain.worker.comm.shared.segments import Pause

# How long a thread sleeps between two looks, while the others have the core and the interpreter.
_SLEEP_SECONDS = 20e-6


class Task(Protocol):
    """What a :class:`Worker` runs.

    Attributes:
        small: it is run when it is submitted, if nothing waits its turn.
        hurried: if it is queued, the thread begins with it; else it is left to who waits for it.
        done: it is not queued.
    """

    small: bool
    hurried: bool
    done: bool

    def execute(self, pause: Pause) -> None:
        """Do it; ``pause`` is what to do between two looks."""

    def end(self, error: BaseException | None) -> None:
        """Note that it is done, and what went wrong in it or before it."""

    def wait(self) -> None:
        """Return when it is done; raises what went wrong."""


class Worker:
    """Runs tasks in the order of submission: in a thread of its own while nobody waits, else in the waiting thread.

    A thread that is about to wait has nothing better to do, and needs no hand-over. Tasks that are not hurried are left
    to it, unless one after them is. When a task fails, those after it fail too: the ranks no longer agree on where they
    are.

    Args:
        beside: have a thread of its own. Without it everything is left to who waits.
        closed: makes the error of tasks that come after :meth:`close`.

    Attributes:
        pause: what who waits does between two looks.
    """

    def __init__(self, *, beside: bool, closed: Callable[[], HpctrainError]) -> None:
        self.pause: Pause = no_pause
        self._after_close = closed
        self._tasks: deque[Task] = deque()
        self._woken = threading.Semaphore(0)
        # Whoever holds it runs the first task to its end, and takes it away then.
        self._running = threading.Lock()
        # The thread in which a task is told that it has ended, and with it whoever waits for its future.
        self._telling: int | None = None
        self._failure: BaseException | None = None
        self._closed = False
        self._thread = threading.Thread(target=self._serve, name="hpctrain-worker", daemon=True) if beside else None
        if self._thread:
            self._thread.start()

    def submit(self, task: Task) -> None:
        """Queue a task, or run it at once if it is small and alone. Waits first for one that is still queued.

        By one thread at a time: ranks have to submit in one order anyway.

        Raises:
            HpctrainError: a callback of a task that ended submits it, or a fork of this rank.
        """
        # It would write to the memory that the ranks share, in place of the rank.
        forks.require_rank("a reduction")
        self._refuse_callbacks()
        if task.small and not self._tasks:
            # Nothing is run either: a task leaves the queue only when it is done.
            self._run(task, self.pause)
            return
        if not task.done:
            task.wait()
        task.done = False
        self._tasks.append(task)
        if task.hurried:
            self._woken.release()

    def run_up_to(self, task: Task) -> None:
        """Run queued tasks up to this one, or wait for them; each is told its error.

        Raises:
            HpctrainError: a callback of a task that ended waits for it.
        """
        if not task.done:
            self._refuse_callbacks()
        while not task.done:
            with self._running:
                if not task.done:
                    self._run_first(self.pause)

    def drain(self) -> None:
        """Run all queued tasks.

        Raises:
            RanksLostError, HpctrainError: a task failed since the last :meth:`reset`.
        """
        with self._running:
            self._run_all()
        if self._failure:
            raise self._failure

    def reset(self) -> None:
        """Discard the queue and any failure."""
        with self._running:
            for task in self._tasks:
                self._end(task, HpctrainError("this buffer was to be reduced by ranks, some of which died"))
            self._tasks.clear()
            self._failure = None

    def close(self) -> None:
        """Run what is queued, unless something failed, and end the thread. Idempotent."""
        with self._running:
            self._run_all()
            self._failure = self._after_close()
        self._closed = True
        self._woken.release()
        if self._thread:
            self._thread.join()

    def _run_all(self) -> None:
        while self._tasks:
            self._run_first(self.pause)

    def _run_first(self, pause: Pause) -> None:
        self._run(self._tasks[0], pause)
        self._tasks.popleft()

    def _run(self, task: Task, pause: Pause) -> None:
        error: BaseException | None = None
        try:
            if self._failure:
                raise self._failure
            task.execute(pause)
        except BaseException as raised:
            error = self._failure = raised
        self._end(task, error)

    def _end(self, task: Task, error: BaseException | None) -> None:
        self._telling = threading.get_ident()
        try:
            task.end(error)
        finally:
            self._telling = None

    def _refuse_callbacks(self) -> None:
        """Those of different tasks run in no order that all ranks share."""
        if self._telling == threading.get_ident():
            raise HpctrainError(
                "a callback that runs when a collective ends calls or awaits another one of the same ranks",
                "wait for the first one in the script, then call the next; or do it in a group of its own "
                "(torch.distributed.new_group)",
            )

    def _serve(self) -> None:
        while True:
            self._woken.acquire()
            if self._closed:
                return
            # All: tasks in front of the one that woke it did not.
            while self._tasks:
                with self._running:
                    if self._tasks:
                        self._run_first(sleep)


def no_pause() -> None:
    """Look again at once."""


def sleep() -> None:
    """Leave the core and the interpreter to others between two looks."""
    time.sleep(_SLEEP_SECONDS)


def threads_may_call_mpi() -> bool:
    """Whether a thread beside the script's may call MPI."""
    from mpi4py import MPI

    return MPI.Query_thread() == MPI.THREAD_MULTIPLE
