"""Collectives of MPI on any communicator, polled, so that each has a limit."""

from __future__ import annotations

import pickle  # nosec B403  # objects of the ranks of one run
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from hpctrain.comm.patience import Patience

if TYPE_CHECKING:
    from mpi4py import MPI

T = TypeVar("T")


def duplicate(comm: MPI.Intracomm, patience: Patience, what: str) -> MPI.Intracomm:
    """A communicator of the same ranks, whose messages are never taken for those of ``comm``."""
    made: list[MPI.Intracomm] = []

    def start() -> MPI.Request:
        fresh, request = comm.Idup()
        made.append(fresh)
        return request

    patience.finish(start, what)
    return made[0]


def allgather(comm: MPI.Intracomm, patience: Patience, value: T, what: str) -> list[T]:
    """The values of all ranks, in the order of the ranks."""
    from mpi4py import MPI

    payload = pickle.dumps(value)
    lengths = np.empty(comm.size, dtype=np.int64)
    own = np.array([len(payload)], dtype=np.int64)
    patience.finish(lambda: comm.Iallgather(own, lengths), what)
    joined = bytearray(int(lengths.sum()))
    starts = np.concatenate(([0], np.cumsum(lengths)[:-1]))
    patience.finish(lambda: comm.Iallgatherv(payload, [joined, lengths, starts, MPI.BYTE]), what)
    view = memoryview(joined)
    parts = zip(starts, lengths, strict=True)
    return [pickle.loads(view[start : start + length]) for start, length in parts]  # nosec B301  # noqa: S301 - of this very run
