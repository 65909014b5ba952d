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
from hpctrain.worker.comm.process_group.dense import as_bytes, give_back
from hpctrain.worker.comm.shared.segments import Pause
from hpctrain.worker.comm.timeout import COLLECTIVE, Timeout

if TYPE_CHECKING:
    from mpi4py import MPI

# How long the thread sleeps between two looks at what is under way.
_LEAST_SECONDS, _MOST_SECONDS = 50e-6, 0.002
# MPI counts the bytes of a message in 32 bits, with a sign.
_MOST_BYTES = 2**31 - 1


class Messages:
    """Sends and receives tensors, any number at a time.

    A thread beside the script drives what is under way: a large message would rest while its sender computes.

    Args:
        comm: the ranks of the group; used for nothing else.
        numbers: their numbers in the run, for messages of another kind.
        timeout: how they wait for each other.
        pause: is called between two looks.
        beside: a thread may call MPI.
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
        self._largest_tag = int(comm.Get_attr(MPI.TAG_UB) or 32767)
        self._beside = beside
        # Two threads must not look at one request.
        self._looking = threading.Lock()
        self._listing = threading.Lock()
        self._under_way: list[MessageWork] = []
        self._woken = threading.Semaphore(0)
        self._closed = False
        self._thread: threading.Thread | None = None

    def send(self, tensor: torch.Tensor, rank: int, tag: int) -> MessageWork:
        """Start sending a tensor, which may not be changed until that is done."""
        sent = as_bytes(tensor).numpy()
        what = f"send of {sent.nbytes} bytes to rank {self.numbers[rank]}"
        return self._start(lambda: self._comm.Isend(sent, rank, self._checked(tag)), what, rank, sent)

    def receive(self, tensor: torch.Tensor, rank: int | None, tag: int) -> MessageWork:
        """Start receiving a tensor, from any rank if none is given."""
        coming = as_bytes(tensor)
        buffer = coming.numpy()
        source = self._any if rank is None else rank
        name = "any rank" if rank is None else f"rank {self.numbers[rank]}"
        what = f"receive of {buffer.nbytes} bytes from {name}"
        return self._start(
            lambda: self._comm.Irecv(buffer, source, self._checked(tag)),
            what,
            rank,
            buffer,
            lambda: give_back(tensor, coming),
        )

    def _checked(self, tag: int) -> int:
        if not 0 <= tag <= self._largest_tag:
            raise HpctrainError(f"tag={tag}: this MPI has tags from 0 to {self._largest_tag}")
        return tag

    def _start(
        self,
        start: Callable[[], MPI.Request],
        what: str,
        rank: int | None,
        buffer: Any,
        finish: Callable[[], None] = lambda: None,
    ) -> MessageWork:
        if self._closed:
            raise HpctrainError(f"{what}: the process group has been destroyed")
        if buffer.nbytes > _MOST_BYTES:
            raise HpctrainError(f"{what}: MPI sends at most {_MOST_BYTES} at once", "send the tensor in parts")
        work = MessageWork(self, start(), what, rank, buffer, finish)
        if not work.is_completed() and self._beside:
            with self._listing:
                self._under_way.append(work)
            if self._thread is None:
                self._thread = threading.Thread(target=self._drive, name="hpctrain-messages", daemon=True)
                self._thread.start()
            self._woken.release()
        return work

    def look(self, work: MessageWork) -> bool:
        """Whether a message is through; lets MPI drive all of them."""
        with self._looking:
            return work.look(self._status())

    def _drive(self) -> None:
        while not self._closed:
            self._woken.acquire()
            pause = _LEAST_SECONDS
            while self._under_way and not self._closed:
                through = [work for work in list(self._under_way) if self._is_over(work)]
                with self._listing:
                    self._under_way = [work for work in self._under_way if work not in through]
                pause = _LEAST_SECONDS if through else min(_MOST_SECONDS, 2 * pause)
                time.sleep(pause)

    def _is_over(self, work: MessageWork) -> bool:
        # What went wrong is for whoever waits for it.
        return work.error is not None or self.look(work) or work.error is not None

    def close(self) -> None:
        """End the thread, and leave what nobody waited for to MPI. Idempotent."""
        self._closed = True
        self._woken.release()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self.timeout.abandon([work for work in self._under_way if not work.done])
        self._under_way = []


class MessageWork(dist.Work):
    """The handle of a message. Waits end by ``HPCTRAIN_TIMEOUT``, whatever limit they are given."""

    def __init__(
        self,
        messages: Messages,
        request: MPI.Request,
        what: str,
        rank: int | None,
        buffer: Any,
        finish: Callable[[], None],
    ) -> None:
        super().__init__()
        self._messages = messages
        self._request = request
        self._what = what
        self._rank = rank
        self._buffer = buffer
        self._finish = finish
        self._source = -1
        self.done = False
        self.error: BaseException | None = None

    def look(self, status: MPI.Status) -> bool:
        """For :class:`Messages` only, in one thread at a time."""
        if self.done or self.error:
            return self.done
        try:
            if self._request.Test(status):
                self._source = status.Get_source()
                self._finish()
                self.done = True
        except Exception as error:
            self.error = error
        return self.done

    def wait(self, timeout: timedelta | None = None) -> bool:
        missing = [] if self._rank is None else [self._messages.numbers[self._rank]]
        try:
            self._messages.timeout.wait(
                self._is_there, self._what, lambda: missing, kind=COLLECTIVE, pause=self._messages.pause
            )
        except BaseException as error:
            self.error = self.error or error
            self._messages.timeout.abandon(self)
            raise
        return True

    def _is_there(self) -> bool:
        there = self.is_completed()
        if self.error:
            raise self.error
        return there

    def synchronize(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        return self._messages.look(self)

    def is_success(self) -> bool:
        return self.done

    def source_rank(self) -> int:
        """The rank in the group that a message came from, once it has."""
        return self._source

    _source_rank = source_rank
