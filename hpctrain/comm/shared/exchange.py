"""Sums of a slice over the nodes: MPI's all-reduce, or for 16-bit types its two halves with float32 between them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from hpctrain.comm.patience import Patience
from hpctrain.comm.shared.kernels import Adder, Array, cut

if TYPE_CHECKING:
    from mpi4py import MPI


class Exchange:
    """Between the ranks that reduce the same slice, one a node.

    Args:
        peers: those ranks.
        patience: how they wait for each other.

    Attributes:
        sent_bytes: the size of all slices that this rank gave to MPI for the network so far.
    """

    def __init__(self, peers: MPI.Intracomm, patience: Patience) -> None:
        self._peers = peers
        self._patience = patience
        self._adders: dict[np.dtype[Any], Adder] = {}
        self.sent_bytes = 0

    def sum(self, own: Array, what: str) -> None:
        """Replace ``own`` by its sum over the nodes, the same bits on all of them."""
        self.sent_bytes += own.nbytes
        if own.dtype.itemsize == 2:
            self._sum_in_float32(own, what)
        else:
            from mpi4py import MPI

            self._wait(self._peers.Iallreduce(MPI.IN_PLACE, own), what)

    def _sum_in_float32(self, own: Array, what: str) -> None:
        """Each node adds up one part of the slice in float32 and hands the sum, rounded once, to all."""
        from mpi4py import MPI

        nodes, rank = self._peers.size, self._peers.rank
        parts = cut(len(own), nodes, 1)
        counts = [2 * (part.stop - part.start) for part in parts]
        wire: list[Any] = [own.view(np.uint8), counts, [2 * part.start for part in parts], MPI.BYTE]
        length = counts[rank]
        received = np.empty((nodes, length // 2), dtype=own.dtype)
        everyone = [received.view(np.uint8), [length] * nodes, [length * node for node in range(nodes)], MPI.BYTE]
        self._wait(self._peers.Ialltoallv(wire, everyone), what)
        adder = self._adders.setdefault(own.dtype, Adder(own.dtype))
        adder.sum(list(received))
        self._wait(self._peers.Iallgatherv([received[0].view(np.uint8), length, MPI.BYTE], wire), what)

    def _wait(self, request: MPI.Request, what: str) -> None:
        self._patience.wait(request.Test, f"{what} between nodes")
