"""Which ranks share memory, and which ranks reduce a slice together between the nodes."""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, cast

from hpctrain.common.cluster.rdma import all_ports

if TYPE_CHECKING:
    from mpi4py import MPI


class Node:
    """This rank's node, and its place in it. Creating and freeing it is collective over the run.

    A node cuts each buffer into as many slices, one a lane, as the smallest node has ranks. On larger nodes several
    ranks share a lane: they add up a part of its slice each, and the first of them talks to the other nodes.

    Args:
        world: all ranks.
        node_of: the number of a rank's node; by default that of the ranks that it can share memory with. Ranks that
            it puts on one node must be able to.
        number: this rank's at the start of the run, which messages call it by; by default that in ``world``.

    Attributes:
        comm: the ranks of this node, in the order of their ranks.
        numbers: of all ranks at the start of the run, by rank.
        ranks: those of this node's, by local rank.
        homes: the first rank of each rank's node, by rank; both of ``world``.
        count: how many nodes there are.
        lanes: into how many slices a node cuts each buffer.
        lane: the one that this rank works on.
        sharers: how many ranks of this node work on it.
        turn: which of them this rank is.
        peers: the first ranks of this lane, one a node, in the order of their ranks; None for the other ranks.
        rdma: all nodes have an adapter that reads the memory of others.
        crowded: there are more ranks than cores for them, so that who waits has to leave its core to others.
    """

    def __init__(
        self, world: MPI.Intracomm, node_of: Callable[[int], int] | None = None, number: int | None = None
    ) -> None:
        from mpi4py import MPI

        if node_of is None:
            comm = world.Split_type(MPI.COMM_TYPE_SHARED, key=world.rank)
        else:
            comm = world.Split(node_of(world.rank), key=world.rank)
        self.comm = cast("MPI.Intracomm", comm)
        try:
            self._find_place(world, world.rank if number is None else number)
        except MPI.Exception:
            # Ranks of this node that got through wait for this one next, where the run's own communicator cannot
            # call them off.
            with contextlib.suppress(AttributeError, NotImplementedError, MPI.Exception):
                self.comm.Revoke()
            raise

    def _find_place(self, world: MPI.Intracomm, number: int) -> None:
        """Collective over ``world`` only: whoever revokes that one ends the wait of all."""
        from mpi4py import MPI

        members = _ranks_in(self.comm, world)
        rdma = any(port.active for port in all_ports())
        everyone = world.allgather((number, members[0], os.sched_getaffinity(0), rdma))
        self.numbers: list[int] = [theirs for theirs, *_ in everyone]
        self.ranks = [self.numbers[rank] for rank in members]
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


def _ranks_in(comm: MPI.Intracomm, world: MPI.Intracomm) -> list[int]:
    """The ranks in ``world`` of those of ``comm``; asks nobody."""
    own, all_ranks = comm.Get_group(), world.Get_group()
    try:
        return own.Translate_ranks(None, all_ranks)
    finally:
        own.Free()
        all_ranks.Free()
