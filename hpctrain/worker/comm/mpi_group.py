"""Groups of neighbouring ranks, each on an MPI communicator of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import numpy as np

from hpctrain.worker.comm.base import AnyArray, Group
from hpctrain.worker.comm.timeout import Timeout

if TYPE_CHECKING:
    from mpi4py import MPI


class MpiGroup(Group):
    """One of the equal parts into which the ranks are divided.

    Args:
        world: all ranks.
        timeout: waits for them.
        size: ranks in a group, which divides them.
        what: they do, in words.
    """

    def __init__(self, world: MPI.Intracomm, timeout: Timeout, size: int, what: str) -> None:
        self._timeout = timeout
        self._what = what
        # The split cannot be polled: its ranks have come to it together.
        with timeout.blocking("forming groups of ranks"):
            self._comm = cast("MPI.Intracomm", world.Split(world.rank // size, world.rank))

    def allreduce(self, array: AnyArray) -> AnyArray:
        sent = np.asarray(array, order="C")
        received = np.empty_like(sent)
        self._timeout.finish(lambda: self._comm.Iallreduce(sent, received), self._what, kind=self._what)
        return received

    def free(self) -> None:
        """Free the communicator, on all ranks of the group together."""
        self._comm.Free()
