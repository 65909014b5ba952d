"""Sums a slice over the nodes."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from hpctrain.comm.shared.kernels import Array, add_up, blocks, cut
from hpctrain.comm.shared.segments import Pause
from hpctrain.comm.timeout import REDUCTION, Timeout

if TYPE_CHECKING:
    from mpi4py import MPI

Transfer = Callable[[Pause], None]
_WORDS = {2: np.dtype(np.uint16), 4: np.dtype(np.uint32), 8: np.dtype(np.uint64)}


class Exchange:
    """The ranks that reduce the same slice, one per node.

    The two halves of an all-reduce, with our own sum between them: each node adds up one part of the slice and hands
    it to all. That is one order of summation for all types on every MPI, which for MPI's own all-reduce is advice
    only, and float32 between 16-bit types; it sends what a ring sends, and Open MPI 5.0's MPI_Iallreduce took three
    times as long for 50 MB.

    Args:
        peers: those ranks.
        timeout: how they wait for each other.

    Attributes:
        sent_bytes: what this rank gave to MPI for other nodes so far, in both halves: of a slice of B bytes on N
            nodes 2 (N - 1) / N x B, the mean over the nodes.
    """

    def __init__(self, peers: MPI.Intracomm, timeout: Timeout) -> None:
        self._peers = peers
        self._timeout = timeout
        self.sent_bytes = 0

    def prepare(self, own: Array, wire: np.dtype[Any], what: str) -> Transfer:
        """A function that replaces ``own`` by its sum over the nodes, with the same bits on all of them.

        Args:
            own: the slice.
            wire: the type in which it travels.
            what: is reduced, for messages.
        """
        travelling = own if wire == own.dtype else np.empty(len(own), dtype=wire)
        parts = cut(len(own), self._peers.size, 1)
        mine = travelling[parts[self._peers.rank]]
        received = np.empty((self._peers.size, len(mine)), dtype=wire)
        # MPI knows no 16-bit floats, and need not: it carries words here, and adds nothing up.
        word = _WORDS[wire.itemsize]
        counts = [part.stop - part.start for part in parts]
        there: list[Any] = [travelling.view(word), (counts, [part.start for part in parts])]
        starts = [len(mine) * node for node in range(self._peers.size)]
        here: list[Any] = [received.view(word), ([len(mine)] * self._peers.size, starts)]
        sums = blocks(list(received))
        # All parts but its own in the first half, its own once for each of the others in the second.
        leaving = travelling.nbytes - mine.nbytes + (self._peers.size - 1) * mine.nbytes
        what = f"{what} between nodes"

        def transfer(pause: Pause) -> None:
            if travelling is not own:
                np.copyto(travelling, own, casting="unsafe")
            self.sent_bytes += leaving
            self._timeout.finish(lambda: self._peers.Ialltoallv(there, here), what, kind=REDUCTION, pause=pause)
            for terms in sums:
                add_up(terms[0], terms)
            mean = received[0].view(word)
            self._timeout.finish(lambda: self._peers.Iallgatherv(mean, there), what, kind=REDUCTION, pause=pause)
            if travelling is not own:
                np.copyto(own, travelling)

        return transfer
