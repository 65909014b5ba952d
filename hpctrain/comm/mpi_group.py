"""Neighbouring ranks on an MPI communicator of their own."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, cast

import numpy as np

from hpctrain.comm.base import AnyArray, Group
from hpctrain.comm.patience import Patience
from hpctrain.errors import HpctrainError

if TYPE_CHECKING:
    from mpi4py import MPI


class MpiGroup(Group):
    """One of the equal parts of the ranks, formed anew where those are.

    Args:
        world: tells the communicator of all ranks, whichever it is by now.
        patience: tells what waits for them.
        size: ranks in a group; None is all of them, however many are left.
    """

    def __init__(self, world: Callable[[], MPI.Intracomm], patience: Callable[[], Patience], size: int | None) -> None:
        self._world = world
        self._patience = patience
        self._size = size
        self._of: MPI.Intracomm | None = None
        self._comm = self._formed()

    def allreduce(self, array: AnyArray) -> AnyArray:
        comm = self._formed()
        sent = np.asarray(array, order="C")
        received = np.empty_like(sent)
        self._patience().finish(lambda: comm.Iallreduce(sent, received), "adding up over a group of ranks")
        return received

    def free(self) -> None:
        """Give the communicator back, all ranks of the group together."""
        if self._of is self._world():
            self._comm.Free()

    def _formed(self) -> MPI.Intracomm:
        world = self._world()
        if self._of is world:
            return self._comm
        size = self._size or world.size
        if world.size % size:
            raise HpctrainError(
                f"{world.size} ranks are left, which do not make groups of {size}",
                "start again with --resume and a multiple of them",
            )
        patience = self._patience()
        # The split cannot be polled: its ranks come to it together.
        patience.finish(world.Ibarrier, "forming groups of ranks")
        with patience.blocking("forming groups of ranks"):
            self._comm = cast("MPI.Intracomm", world.Split(world.rank // size, world.rank))
        self._of = world
        return self._comm
