"""MPI collectives that are polled, so that each wait has a limit."""

from __future__ import annotations

import functools
import pickle  # objects of the ranks of one run
from collections.abc import Iterator
from typing import TYPE_CHECKING, TypeVar

import numpy as np
from numpy.typing import NDArray

from hpctrain.worker.comm.timeout import Timeout

if TYPE_CHECKING:
    from mpi4py import MPI

T = TypeVar("T")
# MPI counts a message's bytes to 2^31 - 1.
_MESSAGE_BYTES = 2**30
# Up to this total size, messages are padded to one length, which saves the exchange of the lengths.
_PADDED_BYTES = 2**20


def pieces(array: NDArray[np.uint8]) -> Iterator[NDArray[np.uint8]]:
    """Cut bytes into pieces that MPI can count."""
    for begin in range(0, len(array), _MESSAGE_BYTES):
        yield array[begin : begin + _MESSAGE_BYTES]


def broadcast(comm: MPI.Intracomm, timeout: Timeout, buffer: NDArray[np.uint8], root: int, what: str) -> None:
    """Overwrite ``buffer``, which is equally long on all ranks, with the root's."""
    for piece in pieces(buffer):
        timeout.finish(functools.partial(comm.Ibcast, piece, root), what)


def duplicate(comm: MPI.Intracomm, timeout: Timeout, what: str) -> MPI.Intracomm:
    """A communicator of the same ranks whose messages cannot be mistaken for those of ``comm``."""
    made: list[MPI.Intracomm] = []

    def start() -> MPI.Request:
        fresh, request = comm.Idup()
        made.append(fresh)
        return request

    timeout.finish(start, what)
    return made[0]


def allgather(comm: MPI.Intracomm, timeout: Timeout, value: T, what: str) -> list[T]:
    """The values of all ranks, in rank order; values may have any size."""
    payload = np.frombuffer(pickle.dumps(value), np.uint8)
    everyone = allgather_bytes(comm, timeout, payload, None, what)
    return [pickle.loads(each.data) for each in everyone]  # noqa: S301 - of this very run


def allgather_bytes(
    comm: MPI.Intracomm, timeout: Timeout, own: NDArray[np.uint8], longest: int | None, what: str
) -> list[NDArray[np.uint8]]:
    """The bytes of all ranks, in rank order. If all know the ``longest`` length, zeros may follow each."""
    if longest is not None and longest * comm.size <= _PADDED_BYTES:
        padded = np.zeros(longest, np.uint8)
        padded[: own.size] = own
        rows = np.empty((comm.size, longest), np.uint8)
        timeout.finish(lambda: comm.Iallgather(padded, rows), what)
        return list(rows)
    lengths = np.empty(comm.size, dtype=np.int64)
    length = np.array([own.size], dtype=np.int64)
    timeout.finish(lambda: comm.Iallgather(length, lengths), what)
    block = max(1, _MESSAGE_BYTES // comm.size)
    rounds = [
        _allgather_block(comm, timeout, own[begin : begin + block], np.clip(lengths - begin, 0, block), what)
        for begin in range(0, int(lengths.max()), block)
    ]
    return [np.concatenate(parts) for parts in zip(*rounds, strict=True)]


def _allgather_block(
    comm: MPI.Intracomm, timeout: Timeout, own: NDArray[np.uint8], lengths: NDArray[np.int64], what: str
) -> list[NDArray[np.uint8]]:
    """The bytes of all ranks, whose lengths are known."""
    from mpi4py import MPI

    joined = np.empty(int(lengths.sum()), np.uint8)
    ends = np.cumsum(lengths)
    timeout.finish(lambda: comm.Iallgatherv(own, [joined, lengths, ends - lengths, MPI.BYTE]), what)
    return np.split(joined, ends[:-1])
