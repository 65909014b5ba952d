"""The processes that prepare images for a rank.

They are spawned and not forked, since the rank has MPI and threads. The memory that they share with it has no name in
the file system, so that nothing of it is left when the last of them has ended, however it did.
"""

from __future__ import annotations

import collections
import contextlib
import ctypes
import math
import mmap
import multiprocessing
import os
import signal
import threading
import time
import traceback
from collections.abc import Generator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from typing import ClassVar

import numpy as np

from hpctrain.common.errors import HpctrainError
from hpctrain.common.run.stopping import STOP_SIGNALS
from hpctrain.common.settings import TIMEOUT, TIMEOUT_HINT
from hpctrain.common.shards.decoding import Pixels
from hpctrain.common.shards.image_shards import Shards
from hpctrain.worker.data.decoder import Cut, Decoder, DecodingJob, LoadedPiece
from hpctrain.worker.data.sampling import Indices

# Images that a process makes, one after the other; or photographs that it only reads, and the place of each file in the
# memory, which is empty if the file had no room there.
Task = Future[list[tuple[Cut, slice]]]

# Signals that stop the run. Workers block them, since the rank ends its workers itself after its step.
_RUN_SIGNALS = [signal.SIGINT, signal.SIGTERM, *(signal.Signals[f"SIG{name}"] for name in STOP_SIGNALS)]
# At most so many images a worker makes between two messages, fewer if a short piece would not keep all workers busy.
# More would make the end of a stream wait longer.
_TASK_IMAGES = 32
# Pieces prepared after the one that is trained on, and the least number of tasks for each worker.
_PIECES_AHEAD = 3
_TASKS_AHEAD = 3
_POLL_SECONDS = 2.0
_END_SECONDS = 2.0
# Parameters of glibc's mallopt, in bytes: the largest it takes for the first, and as much again for what lies between.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_MMAP_BYTES, _TRIM_BYTES = 1 << 25, 1 << 26


class Workers:
    """Processes that take tasks as they become free, on the cores that this process may use.

    Args:
        count: the largest number of processes, at least 1.
    """

    def __init__(self, job: DecodingJob, count: int) -> None:
        self._job, self._count = job, count
        self._timeout = TIMEOUT.read()
        self._memory_file = os.memfd_create("hpctrain-images")
        self._memory: mmap.mmap | None = None
        self._tasks: set[Task] = set()
        arguments = (job, os.getpid(), self._memory_file)
        self._pool = ProcessPoolExecutor(count, multiprocessing.get_context("spawn"), _Worker.begin, arguments)

    @property
    def pids(self) -> list[int]:
        """The ids of the running processes."""
        return list(self._pool._processes)

    def stream(self, split: str, pieces: Sequence[Indices], epoch: int) -> Generator[LoadedPiece]:
        """The images of each piece, while later pieces are already being prepared. One stream at a time.

        Args:
            pieces: sample indices with their repetitions; at least one piece.

        Yields:
            Pieces in order; a piece's place in the memory is reused when the next is asked for.

        Raises:
            HpctrainError: there is not so much memory, or see :meth:`_begin` and :meth:`_finish`.
        """
        assert not self._tasks, "another stream, whose images this one would overwrite, is open"
        shape, longest = self._job.shape(split, epoch), max(map(len, pieces))
        in_task = min(_TASK_IMAGES, -(-longest // self._count))
        further = max(_PIECES_AHEAD, -(-_TASKS_AHEAD * self._count * in_task // longest))
        places, image_bytes = min(len(pieces), 1 + further), math.prod(shape)
        memory = self._reserve(places * longest * image_bytes)
        ahead: collections.deque[tuple[LoadedPiece, list[Task]]] = collections.deque()
        for number in range(len(pieces)):
            for later in range(number + len(ahead), min(number + places, len(pieces))):
                indices, offset = pieces[later], later % places * longest * image_bytes
                images: Pixels = np.ndarray((len(indices), *shape), np.uint8, memory, offset)
                tasks = [
                    self._begin(split, epoch, indices[start : start + in_task].tolist(), offset + start * image_bytes)
                    for start in range(0, len(indices), in_task)
                ]
                ahead.append((LoadedPiece(indices=indices, images=images), tasks))
            piece, tasks = ahead.popleft()
            for task in tasks:
                self._finish(task)
            piece.cuts = [
                cut._replace(position=position, content=memoryview(memory)[place] or cut.content)
                for position, (cut, place) in enumerate(each for task in tasks for each in task.result())
            ]
            yield piece

    def _reserve(self, size: int) -> mmap.mmap:
        """Memory of at least ``size`` bytes for the workers to write to; what earlier calls gave stays valid."""
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

    def _begin(self, split: str, epoch: int, indices: Sequence[int], offset: int) -> Task:
        """Have images made.

        Args:
            indices: sample indices with their repetitions.
            offset: where the first image begins in the memory, in bytes.

        Raises:
            HpctrainError: a process cannot be started, or has died.
        """
        # A process that is started here inherits what is blocked, so that none of these signals ends it.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _RUN_SIGNALS)
        try:
            task = self._pool.submit(_Worker.make, split, epoch, indices, offset)
        except OSError as error:
            raise _failed(f"cannot be started: {error}", "--set data.workers=0") from error
        except BrokenProcessPool as error:
            raise _died() from error
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        self._tasks.add(task)
        return task

    def _finish(self, task: Task) -> None:
        """Wait for a task.

        Raises:
            HpctrainError: a process died, hangs, or could not read a shard or decode an image.
        """
        try:
            task.result(self._timeout)
        except BrokenProcessPool as error:
            raise _died() from error
        except TimeoutError as error:
            raise HpctrainError(
                "HT-loader-timed-out",
                "waited {seconds:g} s for images of the {count} workers of the loader (processes {processes})",
                f"does the storage that holds the shards respond? {TIMEOUT_HINT}",
                exit_code=1,
                seconds=self._timeout,
                count=self._count,
                processes=", ".join(map(str, self.pids)),
            ) from error
        self._tasks.discard(task)

    def drop(self) -> bool:
        """Discard all tasks, in about the time of one; returns whether no worker writes to the memory any more."""
        running = [task for task in self._tasks if not task.cancel()]
        self._tasks.clear()
        return not wait(running, _END_SECONDS).not_done

    def end(self) -> None:
        """End the processes and free the memory."""
        # One that waits for storage which does not answer would be waited for.
        for process in list(self._pool._processes.values()):
            process.kill()
        self._pool.shutdown()
        os.close(self._memory_file)


def _failed(problem: str, hint: str) -> HpctrainError:
    """The error for a worker that cannot make images, or is gone."""
    return HpctrainError(
        "HT-loader-worker-failed", "a worker of the loader {problem}", hint, exit_code=1, problem=problem
    )


def _died() -> HpctrainError:
    return _failed(
        "ended while images were waited for",
        "its last output is in the log of this rank; if there is none, memory ran out: fewer workers (--set "
        "data.workers=N) need less, and so does a smaller --set batch.micro_batch=N",
    )


class _Worker:
    """What a process that prepares images holds."""

    this: ClassVar[_Worker]

    def __init__(self, job: DecodingJob, memory: int) -> None:
        self._job = job
        self._decoders: dict[str, Decoder] = {}
        self._file = memory
        self._memory: mmap.mmap | None = None

    @classmethod
    def begin(cls, job: DecodingJob, rank: int, memory: int) -> None:
        """Prepare this process for the tasks of the process ``rank``, whose file ``memory`` it shares."""
        keep_freed_memory()
        threading.Thread(target=_end_with, args=(rank,), daemon=True).start()
        cls.this = cls(job, os.open(f"/proc/{rank}/fd/{memory}", os.O_RDWR))

    @classmethod
    def make(cls, split: str, epoch: int, indices: Sequence[int], offset: int) -> list[tuple[Cut, slice]]:
        """Make the images of a task, or read its photographs."""
        try:
            return cls.this.write(split, epoch, indices, offset)
        except HpctrainError as error:
            raise error.but(exit_code=1) from error
        except Exception as error:
            traceback.print_exc()
            words = ": ".join([*getattr(error, "__notes__", []), type(error).__name__, str(error)])
            raise _failed(f"failed at {words}", "its traceback is in the log of this rank") from None

    def write(self, split: str, epoch: int, indices: Sequence[int], offset: int) -> list[tuple[Cut, slice]]:
        """Make images in the memory, or read files to where their images would be, as far as they have room there."""
        shape = (len(indices), *self._job.shape(split, epoch))
        images: Pixels = np.ndarray(shape, np.uint8, self._mapped(), offset)
        if split not in self._decoders:
            self._decoders[split] = Decoder(self._job, Shards(self._job.folder, split))
        if not self._job.only_reads:
            self._decoders[split].write(indices, epoch, images)
            return []
        read, last = [], offset + images.nbytes
        for cut in self._decoders[split].cuts(np.array(indices, np.int64), epoch):
            end = offset + len(cut.content)
            if end > last:
                read.append((cut._replace(random=None), slice(0)))
                continue
            self._mapped()[offset:end] = cut.content
            read.append((cut._replace(content=b"", random=None), slice(offset, end)))
            offset = end
        return read

    def _mapped(self) -> mmap.mmap:
        size = os.fstat(self._file).st_size
        if self._memory is None or len(self._memory) < size:
            self._memory = mmap.mmap(self._file, size)
        return self._memory


def keep_freed_memory() -> None:
    """Keep freed memory for the next image: glibc would give it back, and the system zero each page again."""
    with contextlib.suppress(AttributeError):
        libc = ctypes.CDLL(None)
        libc.mallopt(_M_MMAP_THRESHOLD, _MMAP_BYTES)
        libc.mallopt(_M_TRIM_THRESHOLD, _TRIM_BYTES)


def _end_with(rank: int) -> None:
    """End this process with its rank, whose pipes a process that the rank forked may hold open."""
    while os.getppid() == rank:
        time.sleep(_POLL_SECONDS)
    os._exit(0)
