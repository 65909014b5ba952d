"""Which ranks share memory, and which reduce a slice with each other between the nodes."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    from mpi4py import MPI


class Node:
    """This rank's node and its place in it. Making and freeing it is collective over the run.

    A node cuts each buffer into as many slices, one a lane, as the smallest node has ranks. On larger nodes several
    ranks share a lane: they add up a part of its slice each, and the first of them talks to the other nodes.

    Args:
        world: all ranks.
        node_of: the number of a rank's node; by default that of the ranks that it can share memory with. Ranks that
            it puts on one node must be able to.

    Attributes:
        comm: the ranks of this node, in the order of their ranks.
        ranks: their numbers in the run, by local rank.
        count: how many nodes there are.
        lanes: into how many slices a node cuts each buffer.
        lane: the one that this rank works on.
        sharers: how many ranks of this node work on it.
        turn: which of them this rank is.
        peers: the first ranks of this lane, one a node, in the order of their ranks; None for the other ranks.
        crowded: there are more ranks than cores for them, so that who waits has to leave its core to others.
    """

    def __init__(self, world: MPI.Intracomm, node_of: Callable[[int], int] | None = None) -> None:
        from mpi4py import MPI

        if node_of is None:
            comm = world.Split_type(MPI.COMM_TYPE_SHARED, key=world.rank)
        else:
            comm = world.Split(node_of(world.rank), key=world.rank)
        self.comm = cast("MPI.Intracomm", comm)
        self.ranks: list[int] = self.comm.allgather(world.rank)
        self.lanes: int = world.allreduce(self.comm.size, MPI.MIN)
        self.turn, self.lane = divmod(self.comm.rank, self.lanes)
        self.sharers = len(range(self.lane, self.comm.size, self.lanes))
        peers = world.Split(self.lane if self.turn == 0 else MPI.UNDEFINED, key=world.rank)
        self.peers = cast("MPI.Intracomm", peers) if self.turn == 0 else None
        self.count: int = self.comm.bcast(None if self.peers is None else self.peers.size)
        cores = set[int]().union(*self.comm.allgather(os.sched_getaffinity(0)))
        self.crowded = len(cores) < self.comm.size

    def free(self) -> None:
        """Collective over the run."""
        if self.peers is not None:
            self.peers.Free()
        self.comm.Free()
