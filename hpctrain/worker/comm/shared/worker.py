"""Runs a rank's tasks in order, in a thread beside other work or in the thread that waits for them."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable

from hpctrain.common.errors import HpctrainError
from hpctrain.worker.comm import forks
from hpctrain.worker.comm.shared.segments import Pause

# How long a thread sleeps between two polls, so that others get the core and the interpreter.
_SLEEP_SECONDS = 20e-6


class Task:
    """What a :class:`Worker` runs, once or many times.

    Args:
        small: whether to run it at once in the submitting thread, if the queue is empty.
        hurried: whether the worker's thread starts it; otherwise it is left to the thread that waits for it.
    """

    def __init__(self, worker: Worker, *, small: bool, hurried: bool) -> None:
        self.worker, self.small, self.hurried = worker, small, hurried
        self.done = True
        self.error: BaseException | None = None

    def execute(self, pause: Pause) -> None:
        """Do the work; calls ``pause`` between two polls."""
        raise NotImplementedError

    def end(self, error: BaseException | None) -> None:
        """Note that the task is done, with its error."""
        self.error = error
        self.done = True

    def wait(self) -> None:
        """Wait until the task is done, and raise its error or that of a task before it."""
        if not self.done:
            self.worker.run_up_to(self)
        if self.error:
            raise self.error


class Worker:
    """Runs tasks in the order of submission: in a thread of its own while nobody waits, else in the waiting thread.

    A thread that is about to wait can run a task without a hand-over. Tasks that are not hurried are left to it, unless
    a hurried one follows. When a task fails, those after it fail too, because the ranks no longer agree on their place.

    Args:
        beside: whether to have a thread. Without one every task runs in the thread that waits.
        closed: makes the error of tasks submitted after :meth:`close`.
    """

    def __init__(self, *, beside: bool, closed: Callable[[], HpctrainError]) -> None:
        # What a waiting thread calls between two polls.
        self.pause: Pause = no_pause
        self._after_close = closed
        self._tasks: deque[Task] = deque()
        self._woken = threading.Semaphore(0)
        # Held by the thread that runs the first task, until it has taken the task off the queue.
        self._running = threading.Lock()
        # The thread that is inside a task's end(), which may run callbacks of a future.
        self._in_callbacks: int | None = None
        self._failure: BaseException | None = None
        self._closed = False
        self._thread = threading.Thread(target=self._serve, name="hpctrain-worker", daemon=True) if beside else None
        if self._thread:
            self._thread.start()

    def submit(self, task: Task) -> None:
        """Queue a task, or run it at once if it is small and the queue is empty. A task still queued is waited for.

        To be called by one thread at a time, because all ranks have to submit in the same order.
        """
        # A fork would write to the ranks' shared memory in the rank's place.
        forks.require_rank("a reduction")
        self._refuse_callbacks()
        if task.small and not self._tasks:
            # No other task is running: a task leaves the queue only when it is done.
            self._run(task, self.pause)
            return
        if not task.done:
            task.wait()
        task.done = False
        self._tasks.append(task)
        if task.hurried:
            self._woken.release()

    def run_up_to(self, task: Task) -> None:
        """Run queued tasks up to this one, or wait while another thread runs them."""
        if not task.done:
            self._refuse_callbacks()
        while not task.done:
            with self._running:
                if not task.done:
                    self._run_first(self.pause)

    def drain(self) -> None:
        """Run all queued tasks, and raise the error of any that failed since the last :meth:`reset`."""
        with self._running:
            self._run_all()
        if self._failure:
            raise self._failure

    def reset(self) -> None:
        """Discard the queue and any failure."""
        with self._running:
            for task in self._tasks:
                self._end(
                    task,
                    HpctrainError(
                        "HT-reduction-interrupted", "this buffer was to be reduced by ranks, some of which died"
                    ),
                )
            self._tasks.clear()
            self._failure = None

    def close(self) -> None:
        """Run the queued tasks, unless one failed, and end the thread. Idempotent."""
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
        self._in_callbacks = threading.get_ident()
        try:
            task.end(error)
        finally:
            self._in_callbacks = None

    def _refuse_callbacks(self) -> None:
        """Refuse calls from callbacks: those of different tasks run in an order that differs between ranks."""
        if self._in_callbacks == threading.get_ident():
            raise HpctrainError(
                "HT-group-call-in-callback",
                "a callback that runs when a collective ends calls or awaits another one of the same ranks",
                "wait for the first one in the script, then call the next; or do it in a group of its own "
                "(torch.distributed.new_group). PyTorch's PowerSGD hooks need --backend gloo or nccl",
            )

    def _serve(self) -> None:
        while True:
            self._woken.acquire()
            if self._closed:
                return
            # Runs all: the tasks ahead of a hurried one did not wake this thread themselves.
            while self._tasks:
                with self._running:
                    if self._tasks:
                        self._run_first(sleep)


def no_pause() -> None:
    """Poll again at once."""


def sleep() -> None:
    """Yield the core and the interpreter between two polls."""
    time.sleep(_SLEEP_SECONDS)


def threads_may_call_mpi() -> bool:
    """Whether a thread beside the script's may call MPI."""
    from mpi4py import MPI

    return MPI.Query_thread() == MPI.THREAD_MULTIPLE
