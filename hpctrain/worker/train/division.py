"""Which arrays of a state each rank writes into a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from hpctrain.common.checkpoints.layout import OWN, shares, writers
from hpctrain.common.checkpoints.pieces import Box, Piece, Place, check_cover
from hpctrain.worker.comm import Communicator
from hpctrain.worker.train.state import LazyState, State


class StateDivision:
    """Divides states over the ranks, and remembers what the ranks agreed on.

    Args:
        comm: the ranks; after some of them died a new division is needed.
    """

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm
        # What this rank held when the ranks agreed, which pieces it writes, and how many bytes each rank writes.
        self._held: Mapping[Place, int] = {}
        self._places: list[Place] = []
        self._loads: list[int] = []

    def own_part(self, state: LazyState) -> State:
        """The arrays that this rank writes, by their keys in its file: its part of the common state, and its own.

        Collective where the state has pieces: one small reduction, and when a rank holds other ones than before, all
        ranks exchange what they hold.

        Raises:
            HpctrainError: the ranks' pieces do not cover an array.
        """
        rank = self._comm.rank
        # Copied, since the next forward pass changes it; it is small.
        part = {f"{name}.{rank}": state[name].copy() for name in state if name.startswith(OWN)}
        if state.pieces is not None:
            pieces = {Place(name, each.shape, each.box): each for name, held in state.pieces.items() for each in held}
            self._agree(pieces)
            part |= {place.key: pieces[place].array() for place in self._places}
        sizes = ((name, size) for name, size in state.nbytes.items() if not name.startswith(OWN))
        for name in shares(sizes, self._comm.size, self._loads)[rank]:
            array = state[name]
            part[Place(name, array.shape, Box.whole(array.shape)).key] = array
        return part

    def _agree(self, pieces: Mapping[Place, Piece]) -> None:
        held = {place: piece.nbytes for place, piece in pieces.items()}
        # All ranks take part in the exchange if any rank's pieces have changed.
        changed = np.array([not self._loads or held != self._held], np.int64)
        if not self._comm.allreduce(changed, "max")[0]:
            return
        everyones = self._comm.allgather_object(held)
        holders = {place: f"rank {rank}" for rank, places in enumerate(everyones) for place in places}
        check_cover(holders.items())
        written = writers(everyones)
        self._held, self._places = held, written[self._comm.rank]
        self._loads = [sum(everyones[rank][place] for place in places) for rank, places in enumerate(written)]
