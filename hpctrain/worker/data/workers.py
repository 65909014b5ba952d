"""The rank's side of the processes that prepare images.

They are separate programs and not forks, since the rank has MPI and threads. The memory that they share with it has no
name in the file system, so that nothing of it is left when the last of them has ended, however it did.
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
from hpctrain.worker.data.worker import DecodedTask, DecodingTask, receive_result, receive_task, send, worker_failed

# Signals that stop the run. Workers block them, since the rank ends its workers itself after its step.
_RUN_SIGNALS = [signal.SIGINT, signal.SIGTERM, *(signal.Signals[f"SIG{name}"] for name in STOP_SIGNALS)]
_POLL_SECONDS = 0.2
_END_SECONDS = 2.0
# Settings of glibc, in bytes: the largest it takes for the first, and as much again for what lies between.
KEPT_MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(1 << 25), "MALLOC_TRIM_THRESHOLD_": str(1 << 26)}
_OUT_OF_MEMORY = (
    "usually memory ran out: fewer workers (--set data.workers=N) need less, and so does a smaller --set "
    "batch.micro_batch=N"
)


class Workers:
    """Processes that take tasks as they become free, on the cores that this process may use.

    Args:
        count: the number of processes, at least 1.

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
            raise worker_failed(f"cannot be started: {error}", "--set data.workers=0") from error
        finally:
            results.close()

    @property
    def count(self) -> int:
        """The number of processes."""
        return len(self._processes)

    @property
    def pids(self) -> list[int]:
        """The process ids."""
        return [process.pid for process in self._processes]

    def reserve(self, size: int) -> mmap.mmap:
        """Memory of at least ``size`` bytes for the workers to write to; what earlier calls gave stays valid.

        Raises:
            HpctrainError: there is not so much memory.
        """
        if self._memory is None or len(self._memory) < size:
            try:
                os.posix_fallocate(self._memory_file, 0, size)
                self._memory = mmap.mmap(self._memory_file, size)
            except OSError as error:
                raise HpctrainError(
                    "HT-memory-not-available",
                    "no {megabytes:.0f} MB of shared memory for the images that workers prepare: {reason}",
                    "prepare fewer with a smaller --set batch.micro_batch=N, or all in the rank: --set data.workers=0",
                    exit_code=1,
                    megabytes=size / 1000000.0,
                    reason=error.strerror,
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
                    "HT-loader-timed-out",
                    "waited {seconds:g} s for images of the {count} workers of the loader (processes {processes})",
                    f"does the storage that holds the shards respond? {TIMEOUT_HINT}",
                    exit_code=1,
                    seconds=self._timeout,
                    count=len(self._processes),
                    processes=", ".join(map(str, self.pids)),
                )
            self._require_alive()
            self._send()
        result = receive_result(self._results)
        if result is None:
            # All workers have closed their ends, so the first has ended or is about to.
            self._processes[0].wait(self._timeout)
            self._require_alive()
            raise AssertionError("workers without a process")
        self._waiting -= 1
        self._send()
        if result.failure:
            raise HpctrainError.from_record(result.failure)
        return result

    def drop(self) -> bool:
        """Discard all tasks, in about the time of one; returns whether no worker writes to the memory any more."""
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
        """Whether there is a result; waits for one for the poll interval, or until the limit if that comes first."""
        left = min(_POLL_SECONDS, max(0, limit - time.monotonic()))
        return bool(select.select([self._results], [], [], left)[0])

    def _send(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while self._unsent:
                send(self._tasks, self._unsent[0], socket.MSG_DONTWAIT)
                self._unsent.popleft()

    def _require_alive(self) -> None:
        for process in self._processes:
            status = process.poll()
            if status is not None:
                how = f"was killed by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
                hint = _OUT_OF_MEMORY if status == -signal.SIGKILL else "its last output is in the log of this rank"
                raise worker_failed(f"(process {process.pid}) {how} while images were waited for", hint)


def _start(job: DecodingJob, files: tuple[int, int, int]) -> subprocess.Popen[bytes]:
    arguments = [*map(str, files), job.model_dump_json()]
    path = [str(Path(hpctrain.__file__).parent.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    # One thread in each, since there are as many workers as cores. Freed memory is kept for the next image: glibc would
    # give it back, and each page that the next image touches is then zeroed by the system again.
    environment = KEPT_MEMORY | os.environ | {"PYTHONPATH": os.pathsep.join(path), "OPENBLAS_NUM_THREADS": "1"}
    # A process inherits its parent's blocked signals, so that none of them ends it during its start.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _RUN_SIGNALS)
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
