"""The control plane of ranks that send messages: all ranks prove that they make the same call before they use a value.

Collectives are paired by their order alone (MPI-4.1, 6.14). Where one rank calls ``allgather_object`` and another
``broadcast_object``, or one is at the end of its script, each would compute with what the other meant for something
else. So every call begins with the same message: the maximum over the ranks of :data:`_WORDS` integers. They hold a
number of the operation and its complement, whose maxima are complements of each other only where all numbers are equal.
They also hold the value itself where it is small, so that it needs no second message: every rank has a slot, and where
a rank has nothing it writes the least integer.
"""

from __future__ import annotations

import functools
import hashlib
import os
import pickle  # objects of the ranks of one run
import sys
from abc import abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import psutil
from numpy.typing import NDArray

from hpctrain.common.errors import HpctrainError
from hpctrain.worker.comm import forks
from hpctrain.worker.comm.base import AnyArray, Communicator, Reduction
from hpctrain.worker.comm.boards import Board
from hpctrain.worker.comm.liveness import LivenessWatch, Peer
from hpctrain.worker.comm.script_location import mismatch_error, script_place
from hpctrain.worker.comm.stalls import answer_requests
from hpctrain.worker.comm.timeout import Timeout

T = TypeVar("T")
Bytes = NDArray[np.uint8]
Words = NDArray[np.int64]

_WORDS, _HEADER = 64, 3
_LEAST = np.iinfo(np.int64).min
_NOTHING = np.empty(0, np.uint8)
# Of the description of a place, in characters, and with a host's name in bytes.
_PLACE_LENGTH, _DESCRIPTION_BYTES = 400, 2048
_COMBINE: dict[Reduction, np.ufunc] = {"mean": np.add, "sum": np.add, "min": np.minimum, "max": np.maximum}


class CheckedControl(Communicator):
    """A communicator whose ranks prove, at the beginning of each call, that they make the same one."""

    timeout: Timeout

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self._watch: LivenessWatch | None = None
        # This rank's number at the start of the run.
        self._first_rank: int | None = None

    def _watch_waits(self, board: Board) -> None:
        """Watch the waits of all ranks from now on, in place of any watch before. Collective."""
        answer_requests()
        if self._first_rank is None:
            self._first_rank = self.rank
        own = Peer(
            first_rank=self._first_rank,
            host=self.host,
            pid=os.getpid(),
            namespace=Path("/proc/self/ns/pid").stat().st_ino,
            started=psutil.Process().create_time(),
        )
        peers = self.allgather_object(own)
        previous = self._watch
        self._watch = LivenessWatch(board, self.timeout, self.rank, peers, lambda: self.passes)
        self._watch.start()
        # Stopped only now, so that somebody watches the waits all the time.
        if previous:
            previous.stop()

    def _watch_no_more(self, seconds: float | None = None) -> None:
        """Stop to watch without the other ranks, and wait so long for the thread to end. Idempotent."""
        if self._watch:
            self._watch.stop(seconds)
        self._watch = None

    def _leave_training(self) -> None:
        self.timeout.leaving = True

    def barrier(self) -> None:
        self._meet("barrier", "barrier")

    def broadcast_object(self, value: T) -> T:
        own = np.frombuffer(pickle.dumps(value), np.uint8) if self.rank == 0 else None
        length, slots = self._meet("broadcast_object", "broadcast", own, slots=1)
        if own is not None:
            if slots is None:
                self._overwrite(own, 0, "broadcast")
            return value
        received = np.empty(length, np.uint8) if slots is None else slots[0]
        if slots is None:
            self._overwrite(received, 0, "broadcast")
        return pickle.loads(received.data)  # type: ignore[no-any-return]  # noqa: S301 - rank 0 of this very run

    def broadcast_bytes(self, buffer: Bytes, root: int = 0) -> None:
        own = buffer if self.rank == root else None
        _, slots = self._meet(f"broadcast_bytes of {len(buffer)} from rank {root}", "broadcast", own, slots=1)
        if slots is None:
            self._overwrite(buffer, root, "broadcast")
        elif own is None:
            buffer[:] = slots[0, : len(buffer)]

    def allgather_object(self, value: T) -> list[T]:
        own = np.frombuffer(pickle.dumps(value), np.uint8)
        longest, slots = self._meet("allgather_object", "allgather", own, slots=self.size)
        everyone = self._gather(own, longest, "allgather") if slots is None else slots
        # A pickle marks its own end, so the zeros behind it do no harm.
        return [pickle.loads(each.data) for each in everyone]  # noqa: S301 - of this very run

    def allreduce(self, array: AnyArray, reduction: Reduction = "mean") -> AnyArray:
        sent = np.asarray(array, order="C")  # ascontiguousarray would give a number a dimension
        self.reduced_by_hand = self.reduced_by_hand or (sent.size > 1 and not _purpose())
        operation, what = _reducing(reduction, sent.dtype, sent.shape)
        _, slots = self._meet(operation, what, sent.reshape(-1).view(np.uint8), slots=self.size)
        if slots is None:
            received = self._reduce(sent, reduction, what)
        else:
            everyone = np.ascontiguousarray(slots[:, : sent.nbytes]).view(sent.dtype).reshape(self.size, *sent.shape)
            received = np.asarray(_COMBINE[reduction].reduce(everyone, axis=0, dtype=sent.dtype))
        return received / self.size if reduction == "mean" else received

    def _meet(
        self, operation: str, what: str, own: Bytes | None = _NOTHING, *, slots: int = 0
    ) -> tuple[int, Bytes | None]:
        """Prove that all ranks call the same, and exchange what they send if it fits into the same message.

        Args:
            operation: the call, with everything that has to be the same on every rank.
            own: the bytes that this rank sends; None if only another rank sends.
            slots: 1 if one rank sends, :attr:`size` if all do.

        Returns:
            The length in bytes of the longest message; and a row for each slot, with padding behind what was sent, or
            None if a rank's message does not fit into its slot.
        """
        forks.require_rank(what)
        purpose = _purpose()
        words: Words = np.full(_WORDS, _LEAST)
        number = _number(operation, purpose)
        room = (_WORDS - _HEADER) // slots if slots else 0
        words[:_HEADER] = number, ~number, 0 if own is None else own.size
        if own is not None and own.size <= 8 * room:
            begin = _HEADER + (self.rank * room if slots > 1 else 0)
            words[begin : begin + room].view(np.uint8)[: own.size] = own
        self._maximum(words, what)
        if words[0] != ~words[1]:
            raise self._differ(operation)
        longest = int(words[2])
        if longest > 8 * room:
            return longest, None
        return longest, words[_HEADER : _HEADER + slots * room].view(np.uint8).reshape(slots, 8 * room)

    def _differ(self, operation: str) -> HpctrainError:
        """The error that names the different calls, the same on all ranks. Collective."""
        place = "in " + script_place(operation, ended=self.timeout.leaving, passes=self.passes)
        own = np.frombuffer(pickle.dumps((self.host, place[:_PLACE_LENGTH])), np.uint8)
        everyone = self._gather(own, _DESCRIPTION_BYTES, "a comparison")
        return mismatch_error(pickle.loads(each.data) for each in everyone)  # noqa: S301 - of this very run

    # The subclass implements these with its own messages. Each is collective.

    @abstractmethod
    def _maximum(self, words: Words, what: str) -> None:
        """Replace each word by its maximum over the ranks, in place."""

    @abstractmethod
    def _overwrite(self, buffer: Bytes, root: int, what: str) -> None:
        """Overwrite ``buffer``, equally long on all ranks, by that of rank ``root``, in place."""

    @abstractmethod
    def _gather(self, own: Bytes, longest: int, what: str) -> Sequence[Bytes]:
        """The bytes of all ranks, of at most ``longest`` each; zeros may follow each."""

    @abstractmethod
    def _reduce(self, array: AnyArray, reduction: Reduction, what: str) -> AnyArray:
        """The array reduced over all ranks; for "mean" the sum, which the caller divides."""


def _purpose() -> str:
    """The function of hpctrain that makes the call, or "" for the script: calls of the two never belong together."""
    frame: Any = sys._getframe(1)
    while frame.f_globals.get("__name__") == __name__:
        frame = frame.f_back
    module: str = frame.f_globals.get("__name__") or ""
    return f"{module}.{frame.f_code.co_qualname}" if module.startswith("hpctrain.") else ""


# Called in each training step, where NumPy's name of a type would take as long as everything else.
@functools.lru_cache(maxsize=1024)
def _reducing(reduction: Reduction, dtype: np.dtype[Any], shape: tuple[int, ...]) -> tuple[str, str]:
    """An allreduce with everything that has to be the same on every rank, and its name in messages."""
    what = f"allreduce ({reduction})"
    return f"{what} of {dtype}{list(shape)}", what


@functools.lru_cache(maxsize=1024)
def _number(operation: str, purpose: str) -> int:
    digest = hashlib.blake2b(f"{operation}\n{purpose}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)
