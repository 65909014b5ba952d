"""Which ranks share memory, and which reduce a slice with each other between the nodes."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    from mpi4py import MPI


class Node:
    """This rank's node and its place in it.

    Attributes:
        comm: the ranks of this node, in the order of their ranks.
        ranks: their numbers in the run, by local rank.
        count: how many nodes there are.
        lanes: into how many slices a node cuts each buffer: the ranks of the smallest node.
        lane: the slice that this rank reduces, None where its node has more ranks than slices.
        peers: the ranks with the same lane, one a node, in the order of their ranks; None for a rank without one.
    """

    def __init__(self, world: MPI.Intracomm) -> None:
        from mpi4py import MPI

        self.comm = cast("MPI.Intracomm", world.Split_type(MPI.COMM_TYPE_SHARED, key=world.rank))
        self.ranks: list[int] = self.comm.allgather(world.rank)
        self.lanes: int = world.allreduce(self.comm.size, MPI.MIN)
        self.lane = self.comm.rank if self.comm.rank < self.lanes else None
        peers = world.Split(MPI.UNDEFINED if self.lane is None else self.lane, key=world.rank)
        self.peers = None if self.lane is None else cast("MPI.Intracomm", peers)
        self.count: int = self.comm.bcast(None if self.peers is None else self.peers.size)

    def free(self) -> None:
        """Collective over the run."""
        if self.peers is not None:
            self.peers.Free()
        self.comm.Free()
