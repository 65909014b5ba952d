"""Which ranks share memory, and which ranks reduce a slice together between the nodes."""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from typing import TYPE_CHECKING, cast

from hpctrain.common.cluster.interfaces import all_ports

if TYPE_CHECKING:
    from mpi4py import MPI


class LocalNode:
    """This rank's node, and its place in it. Creating and freeing it is collective over the run.

    A node cuts each buffer into as many slices, one per lane, as the smallest node has ranks. On larger nodes several
    ranks share a lane: each adds up a part of its slice, and the first of them exchanges it with the other nodes.

    Attributes:
        comm: the ranks of this node, in the order of their ranks.
        numbers: all ranks' numbers at the start of the run, by rank, for messages.
        homes: the first rank of each rank's node, by rank.
        lanes: into how many slices a node cuts each buffer.
        lane: the number of the slice that this rank works on.
        sharers: how many ranks of this node share the lane.
        turn: the index of this rank among them.
        peers: the first rank of this lane on each node, in the order of their ranks; None on other ranks.
        rdma: whether all nodes have an active RDMA adapter.
        crowded: whether there are more ranks than cores, so that a waiting rank has to yield its core.
    """

    def __init__(self, world: MPI.Intracomm) -> None:
        from mpi4py import MPI

        self.comm = ranks_of_node(world)
        try:
            self._find_place(world)
        except MPI.Exception:
            # Ranks of this node that succeeded wait for this one next, on a communicator of the node's own: revoking
            # that of the run would not end their wait.
            with contextlib.suppress(AttributeError, NotImplementedError, MPI.Exception):
                self.comm.Revoke()
            raise

    def _find_place(self, world: MPI.Intracomm) -> None:
        """Collective over ``world`` only, so that revoking it ends the wait of all ranks."""
        from mpi4py import MPI

        members = _ranks_in(self.comm, world)
        rdma = any(port.active for port in all_ports())
        everyone = world.allgather((MPI.COMM_WORLD.rank, members[0], os.sched_getaffinity(0), rdma))
        self.numbers: list[int] = [theirs for theirs, *_ in everyone]
        self.homes: list[int] = [first for _, first, *_ in everyone]
        self.rdma = all(theirs for *_, theirs in everyone)
        sizes = Counter(self.homes)
        self.count = len(sizes)
        self.lanes = min(sizes.values())
        self.turn, self.lane = divmod(self.comm.rank, self.lanes)
        self.sharers = len(range(self.lane, self.comm.size, self.lanes))
        self.crowded = len(set[int]().union(*(everyone[rank][2] for rank in members))) < self.comm.size
        peers = world.Split(self.lane if self.turn == 0 else MPI.UNDEFINED, key=world.rank)
        self.peers = cast("MPI.Intracomm", peers) if self.turn == 0 else None

    def free(self) -> None:
        """Free its communicators. Collective over the run."""
        if self.peers is not None:
            self.peers.Free()
        self.comm.Free()


def ranks_of_node(world: MPI.Intracomm) -> MPI.Intracomm:
    """The ranks that can share memory with this one, in the order of their ranks. Collective."""
    from mpi4py import MPI

    return cast("MPI.Intracomm", world.Split_type(MPI.COMM_TYPE_SHARED, key=world.rank))


def _ranks_in(comm: MPI.Intracomm, world: MPI.Intracomm) -> list[int]:
    """The ranks in ``world`` of the ranks of ``comm``. Sends no message."""
    own, all_ranks = comm.Get_group(), world.Get_group()
    try:
        return own.Translate_ranks(None, all_ranks)
    finally:
        own.Free()
        all_ranks.Free()
