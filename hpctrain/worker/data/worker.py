"""A process that prepares images for a rank: ``python -m hpctrain.worker.data.worker TASKS RESULTS MEMORY JOB``.

The first three are the numbers of inherited files: the sockets for tasks and for results, and the memory for the
images. The process ends when its rank is gone, because then the other ends of the sockets are closed.
"""

from __future__ import annotations

import json
import mmap
import os
import socket
import sys
import time
import traceback
from dataclasses import dataclass
from typing import Any

import numpy as np

from hpctrain.common.errors import HpctrainError
from hpctrain.common.shards.decoding import Pixels
from hpctrain.common.shards.image_shards import Shards
from hpctrain.worker.data.decoder import Broken, Decoder, DecodingJob

# The most bytes of a task or a result, each of which a SOCK_SEQPACKET socket keeps in one piece.
_MESSAGE_BYTES = 1 << 16
_POLL_SECONDS = 2.0
# The longest text of a failure, for which JSON takes up to 12 bytes a character, and the most bytes of its values.
_FAILURE_CHARACTERS = 2000
_VALUES_BYTES = 8000


@dataclass(frozen=True, kw_only=True)
class DecodingTask:
    """Images to make, one after the other.

    Attributes:
        offset: where the first image begins in the memory, in bytes.
    """

    number: int
    split: str
    epoch: int
    indices: list[int]
    offset: int


@dataclass(frozen=True, kw_only=True)
class DecodedTask:
    """A task that is done, or has failed.

    Attributes:
        broken: images that could not be decoded, with their positions in the task.
        failure: any other fault, as :meth:`~hpctrain.common.errors.HpctrainError.record` has it; None without one.
        nanoseconds: spent on each of :data:`hpctrain.worker.data.decoder.STAGES`, and of the processor's time since
            the last task was done (``processor``).
    """

    number: int
    broken: list[Broken]
    failure: dict[str, Any] | None
    nanoseconds: dict[str, int]


def worker_failed(problem: str, hint: str) -> HpctrainError:
    """The error for a worker that cannot make images, or is gone."""
    return HpctrainError(
        "HT-loader-worker-failed", "a worker of the loader {problem}", hint, exit_code=1, problem=problem
    )


def send(end: socket.socket, message: DecodingTask | DecodedTask, flags: int = 0) -> None:
    """Send a message. Raises OSError if the other end is closed or, with MSG_DONTWAIT, if the socket is full."""
    # What asdict does besides, a deep copy, takes longer than everything else here.
    end.send(json.dumps(vars(message)).encode(), flags)


def receive_task(end: socket.socket, flags: int = 0) -> DecodingTask | None:
    """The next task, which only one process gets; None if the sender is gone."""
    message = end.recv(_MESSAGE_BYTES, flags)
    return DecodingTask(**json.loads(message)) if message else None


def receive_result(end: socket.socket) -> DecodedTask | None:
    """The next result; None if all workers are gone."""
    message = end.recv(_MESSAGE_BYTES)
    return DecodedTask(**json.loads(message)) if message else None


def main(tasks: str, results: str, memory: str, job: str) -> None:
    source, sink = socket.socket(fileno=int(tasks)), socket.socket(fileno=int(results))
    rank = os.getppid()
    source.settimeout(_POLL_SECONDS)
    worker = _Worker(DecodingJob.model_validate_json(job), int(memory))
    # The sockets alone do not show that the rank is gone: a process that it forked may hold their other ends.
    while os.getppid() == rank:
        try:
            task = receive_task(source)
            if task is None:
                return
            send(sink, worker.do(task))
        except TimeoutError:
            continue
        except (BrokenPipeError, ConnectionResetError):
            return


class _Worker:
    def __init__(self, job: DecodingJob, memory: int) -> None:
        self._job = job
        self._decoders: dict[str, Decoder] = {}
        self._file = memory
        self._memory: mmap.mmap | None = None
        self._spent = time.process_time_ns()

    def do(self, task: DecodingTask) -> DecodedTask:
        broken: list[Broken] = []
        record = None
        try:
            broken = self._write(task)
        except HpctrainError as error:
            record = error.but(exit_code=1).record()
        except Exception as error:
            traceback.print_exc()
            words = ": ".join([*getattr(error, "__notes__", []), type(error).__name__, str(error)])
            record = worker_failed(f"failed at {words}", "its traceback is in the log of this rank").record()
        nanoseconds: dict[str, int] = {}
        for decoder in self._decoders.values():
            nanoseconds |= decoder.nanoseconds
            decoder.nanoseconds.clear()
        # Read once a task: unlike the other clocks it is a system call, after which caches are cold.
        spent = time.process_time_ns()
        nanoseconds["processor"] = spent - self._spent
        self._spent = spent
        return DecodedTask(
            number=task.number, broken=broken, failure=_bounded(record) if record else None, nanoseconds=nanoseconds
        )

    def _write(self, task: DecodingTask) -> list[Broken]:
        shape = (len(task.indices), *self._job.shape(task.split, task.epoch))
        images: Pixels = np.ndarray(shape, np.uint8, self._mapped(), task.offset)
        if task.split not in self._decoders:
            self._decoders[task.split] = Decoder(self._job, Shards(self._job.folder, task.split))
        return self._decoders[task.split].write(task.indices, task.epoch, images)

    def _mapped(self) -> mmap.mmap:
        size = os.fstat(self._file).st_size
        if self._memory is None or len(self._memory) < size:
            self._memory = mmap.mmap(self._file, size)
        return self._memory


def _bounded(failure: dict[str, Any]) -> dict[str, Any]:
    """The record of an error, so short that it fits into a message."""
    texts = {name: failure[name][:_FAILURE_CHARACTERS] for name in ("message", "hint")}
    fit = len(json.dumps(failure["values"])) <= _VALUES_BYTES
    return failure | texts | {"values": failure["values"] if fit else {}}


if __name__ == "__main__":
    main(*sys.argv[1:])
