"""The rank's side of the processes that prepare images.

They are programs of their own and no forks, since the rank has MPI and threads. What they share with it has no name in
the file system, so that nothing is left of it when the last of them is gone, however they ended.
"""

from __future__ import annotations

import collections
import contextlib
import mmap
import os
import select
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import hpctrain
from hpctrain.common.errors import HpctrainError
from hpctrain.common.run.stopping import STOP_SIGNALS
from hpctrain.common.settings import TIMEOUT, TIMEOUT_HINT
from hpctrain.worker.data.decoder import DecodingJob
from hpctrain.worker.data.worker import DecodedTask, DecodingTask, receive_result, receive_task, send

# They are the run's: it ends its workers itself, when it has ended its step.
_NOT_THEIRS = [signal.SIGINT, signal.SIGTERM, *(signal.Signals[f"SIG{name}"] for name in STOP_SIGNALS)]
_LOOK_SECONDS = 0.2
_END_SECONDS = 2.0
_OUT_OF_MEMORY = (
    "usually memory ran out: fewer workers (--set data.workers=N) need less, and so does a smaller --set "
    "batch.micro_batch=N"
)


class Workers:
    """Processes that take tasks as they become free, on the cores that this process may use.

    Args:
        job: what they make.
        count: of the processes, at least 1.

    Raises:
        HpctrainError: they cannot be started.
    """

    def __init__(self, job: DecodingJob, count: int) -> None:
        self._timeout = TIMEOUT.read()
        self._ended = False
        self._waiting = 0
        self._unsent: collections.deque[DecodingTask] = collections.deque()
        self._memory_file = os.memfd_create("hpctrain-images")
        self._memory: mmap.mmap | None = None
        self._tasks, self._theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._results, results = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        files = (self._theirs.fileno(), results.fileno(), self._memory_file)
        self._processes: list[subprocess.Popen[bytes]] = []
        try:
            for _ in range(count):
                self._processes.append(_start(job, files))
        except OSError as error:
            self.end()
            raise HpctrainError(f"cannot start a worker of the loader: {error}", "--set data.workers=0") from error
        finally:
            results.close()

    @property
    def pids(self) -> list[int]:
        """The process ids."""
        return [process.pid for process in self._processes]

    def reserve(self, size: int) -> mmap.mmap:
        """Make sure of so many bytes for the workers to write to; earlier memory is kept.

        Raises:
            HpctrainError: there is not so much memory.
        """
        if self._memory is None or len(self._memory) < size:
            try:
                os.posix_fallocate(self._memory_file, 0, size)
                self._memory = mmap.mmap(self._memory_file, size)
            except OSError as error:
                raise HpctrainError(
                    f"no {size / 1e6:.0f} MB of shared memory for the images that workers prepare: {error.strerror}",
                    "prepare fewer with a smaller --set batch.micro_batch=N, or all in the rank: --set data.workers=0",
                    exit_code=1,
                ) from error
        return self._memory

    def put(self, task: DecodingTask) -> None:
        """Give a task to the processes."""
        self._unsent.append(task)
        self._waiting += 1
        self._send()

    def take(self) -> DecodedTask:
        """The next finished task.

        Raises:
            HpctrainError: a process died, hangs, or could not read a shard.
        """
        limit = time.monotonic() + self._timeout
        while not self._arrived(limit):
            if time.monotonic() > limit:
                raise HpctrainError(
                    f"waited {self._timeout:g} s for images of the {len(self._processes)} workers of the loader "
                    f"(processes {', '.join(map(str, self.pids))})",
                    f"does the storage that holds the shards respond? {TIMEOUT_HINT}",
                    exit_code=1,
                )
            self._require_life()
            self._send()
        result = receive_result(self._results)
        if result is None:
            # all are ending, if they have not ended
            self._processes[0].wait(self._timeout)
            self._require_life()
            raise AssertionError("workers without a process")
        self._waiting -= 1
        self._send()
        if result.failure:
            raise HpctrainError(*result.failure, exit_code=1)
        return result

    def drop(self) -> bool:
        """Discard all tasks; True once nothing writes to the memory any more, in about the time of a task."""
        self._waiting -= len(self._unsent)
        self._unsent.clear()
        with contextlib.suppress(BlockingIOError):
            while receive_task(self._theirs, socket.MSG_DONTWAIT):
                self._waiting -= 1
        limit = time.monotonic() + _END_SECONDS
        while self._waiting and time.monotonic() < limit:
            if self._arrived(limit):
                if receive_result(self._results) is None:
                    return False
                self._waiting -= 1
        return not self._waiting

    def end(self) -> None:
        """End the processes and free the memory. Idempotent."""
        if self._ended:
            return
        self._ended = True
        for own in (self._tasks, self._theirs, self._results):
            own.close()
        os.close(self._memory_file)
        limit = time.monotonic() + _END_SECONDS
        for process in self._processes:
            try:
                process.wait(max(0, limit - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def _arrived(self, limit: float) -> bool:
        """Whether there is a result, at the latest at the limit, and before that after a while."""
        left = min(_LOOK_SECONDS, max(0, limit - time.monotonic()))
        return bool(select.select([self._results], [], [], left)[0])

    def _send(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while self._unsent:
                send(self._tasks, self._unsent[0], socket.MSG_DONTWAIT)
                self._unsent.popleft()

    def _require_life(self) -> None:
        for process in self._processes:
            status = process.poll()
            if status is not None:
                how = f"was killed by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
                raise HpctrainError(
                    f"a worker of the loader (process {process.pid}) {how} while images were waited for",
                    _OUT_OF_MEMORY if status == -signal.SIGKILL else "its last output is in the log of this rank",
                    exit_code=1,
                )


def _start(job: DecodingJob, files: tuple[int, int, int]) -> subprocess.Popen[bytes]:
    arguments = [*map(str, files), job.model_dump_json()]
    path = [str(Path(hpctrain.__file__).parent.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    # One thread each: there are as many of them as cores.
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path), "OPENBLAS_NUM_THREADS": "1"}
    # A process begins with the signals blocked that its parent blocks, so none falls into its start.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _NOT_THEIRS)
    try:
        return subprocess.Popen(
            [sys.executable, "-P", "-m", "hpctrain.worker.data.worker", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            pass_fds=files,
            env=environment,
        )
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
