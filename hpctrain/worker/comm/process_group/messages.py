"""Messages from one rank of a group to another: send and receive of torch.distributed, by MPI."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from hpctrain.common.errors import HpctrainError
from hpctrain.worker.comm.shared.segments import Pause
from hpctrain.worker.comm.timeout import Timeout

if TYPE_CHECKING:
    from mpi4py import MPI


# The shortest and the longest sleep of the thread between two polls.
_LEAST_SECONDS, _MOST_SECONDS = 50e-6, 0.002


class Messages:
    """Sends and receives tensors, any number at a time.

    A thread beside the script polls the messages, or a large one would make no progress while its sender computes.

    Args:
        comm: the ranks of the group; used for nothing else.
        numbers: the ranks' numbers in the run, for error messages.
        beside: whether a thread beside the script's may call MPI.
    """

    def __init__(
        self, comm: MPI.Intracomm, numbers: Sequence[int], timeout: Timeout, pause: Pause, *, beside: bool
    ) -> None:
        from mpi4py import MPI

        self.numbers = numbers
        self.timeout = timeout
        self.pause = pause
        self._comm = comm
        self._any = MPI.ANY_SOURCE
        self._status = MPI.Status
        self._beside = beside
        # Two threads must not test one request at a time.
        self._testing = threading.Lock()
        self._listing = threading.Lock()
        self._under_way: list[MessageWork] = []
        self._woken = threading.Semaphore(0)
        self._closed = False
        self._thread: threading.Thread | None = None

    def send(self, tensor: torch.Tensor, rank: int, tag: int) -> MessageWork:
        """Start sending a tensor, which must not change until the message has left."""
        sent = as_bytes(tensor).numpy()
        what = f"send of {sent.nbytes} bytes to rank {self.numbers[rank]}"
        return self._start(lambda: self._comm.Isend(sent, rank, tag), what, sent)

    def receive(self, tensor: torch.Tensor, rank: int | None, tag: int) -> MessageWork:
        """Start receiving a tensor; from any rank if ``rank`` is None."""
        coming = as_bytes(tensor)
        buffer = coming.numpy()
        source = self._any if rank is None else rank
        name = "any rank" if rank is None else f"rank {self.numbers[rank]}"
        what = f"receive of {buffer.nbytes} bytes from {name}"
        return self._start(
            lambda: self._comm.Irecv(buffer, source, tag),
            what,
            buffer,
            lambda: give_back(tensor, coming),
        )

    def _start(
        self,
        start: Callable[[], MPI.Request],
        what: str,
        buffer: Any,
        finish: Callable[[], None] = lambda: None,
    ) -> MessageWork:
        if self._closed:
            raise destroyed_error()
        work = MessageWork(self, start(), what, buffer, finish)
        if not work.is_completed() and self._beside:
            with self._listing:
                self._under_way.append(work)
            if self._thread is None:
                self._thread = threading.Thread(target=self._poll, name="hpctrain-messages", daemon=True)
                self._thread.start()
            self._woken.release()
        return work

    def test(self, work: MessageWork) -> bool:
        """Whether a message has come, or failed; the call lets MPI make progress with all messages."""
        with self._testing:
            return work.test(self._status())

    def _poll(self) -> None:
        while not self._closed:
            self._woken.acquire()
            pause = _LEAST_SECONDS
            while self._under_way and not self._closed:
                # The error of one that failed is raised by its wait().
                ended = [work for work in list(self._under_way) if self.test(work)]
                with self._listing:
                    self._under_way = [work for work in self._under_way if work not in ended]
                pause = _LEAST_SECONDS if ended else min(_MOST_SECONDS, 2 * pause)
                time.sleep(pause)

    def close(self) -> None:
        """End the thread, and leave unfinished messages to MPI. Idempotent."""
        self._closed = True
        self._woken.release()
        if self._thread is not None:
            self._thread.join()
        self.timeout.abandon([work for work in self._under_way if not work.done])
        self._under_way = []


class MessageWork(dist.Work):
    """The handle of a message. Waits end after ``HPCTRAIN_TIMEOUT``, whatever limit they are given."""

    def __init__(
        self,
        messages: Messages,
        request: MPI.Request,
        what: str,
        buffer: Any,
        finish: Callable[[], None],
    ) -> None:
        super().__init__()
        self._messages = messages
        self._request = request
        self._what = what
        self._buffer = buffer
        self._finish = finish
        self._source = -1
        self.done = False
        self.error: BaseException | None = None

    def test(self, status: MPI.Status) -> bool:
        """Test the request; called by :class:`Messages` only, in one thread at a time."""
        try:
            if not (self.done or self.error) and self._request.Test(status):
                self._source = status.Get_source()
                self._finish()
                self.done = True
        except Exception as error:
            self.error = error
        return self.done or self.error is not None

    def wait(self, timeout: timedelta | None = None) -> bool:
        try:
            self._messages.timeout.wait(self._is_done, self._what, pause=self._messages.pause, keep=self)
        except BaseException as error:
            self.error = self.error or error
            raise
        return True

    def _is_done(self) -> bool:
        ended = self.is_completed()
        if self.error:
            raise self.error
        return ended

    def synchronize(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        return self._messages.test(self)

    def is_success(self) -> bool:
        return self.done

    def source_rank(self) -> int:
        """The rank in the group that a message came from; -1 until it has arrived."""
        return self._source

    _source_rank = source_rank


def destroyed_error() -> HpctrainError:
    """The error of a call in a group that was destroyed."""
    return HpctrainError(
        "HT-group-destroyed",
        "a collective was called in a process group that was destroyed",
        "call destroy_process_group() and ht.shutdown() after the last collective",
        exit_code=1,
    )


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor in one dimension; a copy of one that is not contiguous."""
    whole = tensor.detach().contiguous()
    # Not view(-1), which may keep the odd stride of a dimension of one element or none; a view as bytes refuses it.
    return whole.as_strided((whole.numel(),), (1,))


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's bytes in one dimension; a copy of a tensor that is not contiguous."""
    return flat(tensor).view(torch.uint8)


def give_back(tensor: torch.Tensor, whole: torch.Tensor) -> None:
    """Copy the result of :func:`flat` or :func:`as_bytes` back to its tensor, if it was a copy."""
    if not tensor.is_contiguous():
        tensor.detach().copy_(whole.view(tensor.dtype).view(tensor.shape))
