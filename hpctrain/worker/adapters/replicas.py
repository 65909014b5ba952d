"""Which checksums of which ranks have to be equal: those of the same elements of the same parameter."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import xxhash
from numpy.typing import NDArray

from hpctrain.common.checkpoints.pieces import Box
from hpctrain.worker.comm.base import Communicator

Checksums = NDArray[np.int64]


class Replicas:
    """Parameters that every rank holds whole, in the same order.

    Attributes:
        names: the names of what is compared; several pieces of one parameter have its name each.
        what: a plural noun for messages.
    """

    what = "parameters"

    def __init__(self, names: Sequence[str]) -> None:
        self.names = list(names)

    def spread(self, own: Checksums) -> NDArray[np.int64]:
        """This rank's checksums and their complements, each at its place, of shape (2, names). After a maximum over
        the ranks either row is the complement of the other where the ranks agree.

        The maximum of x and of ~x (which is -x-1, without its overflow) tells maximum and minimum in one reduction.
        """
        return np.stack([own, ~own])

    def index(self, place: int) -> int | None:
        """The index among this rank's checksums of a column of :meth:`spread`; None where this rank has none."""
        return place

    def offsets(self, place: int) -> tuple[int, ...] | None:
        """Where in its parameter the piece at a place begins; None for whole parameters."""
        return None

    def proofs(self, own: Checksums) -> dict[str, str]:
        """One hash for each group of ranks whose checksums have to be equal, by a name that the group alone has."""
        return {"all": xxhash.xxh3_128_hexdigest(own.data)}


class ReplicasOfPieces(Replicas):
    """Pieces that several ranks hold. What one rank alone holds is not compared. Creating it is collective.

    Args:
        names: the parameter of each of this rank's pieces.
        boxes: the elements of the parameter that each piece has.
    """

    what = "pieces of parameters"

    def __init__(self, comm: Communicator, names: Sequence[str], boxes: Sequence[Box]) -> None:
        own = {piece: index for index, piece in enumerate(zip(names, boxes, strict=True))}
        holders: dict[tuple[str, Box], list[int]] = {}
        for rank, pieces in enumerate(comm.allgather_object(list(own))):
            for piece in pieces:
                holders.setdefault(piece, []).append(rank)
        # Ordered by the lowest rank that holds a piece, and within it as in the model.
        self._pieces = [piece for piece, ranks in holders.items() if len(ranks) > 1]
        super().__init__([name for name, _ in self._pieces])
        self._indices = [own.get(piece) for piece in self._pieces]
        held = [(place, index) for place, index in enumerate(self._indices) if index is not None]
        self._places = np.array([place for place, _ in held], np.int64)
        self._held = np.array([index for _, index in held], np.int64)
        self._groups: dict[str, list[int]] = {}
        for place, index in held:
            group = ",".join(map(str, holders[self._pieces[place]]))
            self._groups.setdefault(group, []).append(index)

    def spread(self, own: Checksums) -> NDArray[np.int64]:
        # The lowest number, so that the maximum is that of the ranks which hold the piece.
        spread = np.full((2, len(self.names)), np.iinfo(np.int64).min)
        spread[:, self._places] = super().spread(own[self._held])
        return spread

    def index(self, place: int) -> int | None:
        return self._indices[place]

    def offsets(self, place: int) -> tuple[int, ...]:
        return self._pieces[place][1].offsets

    def proofs(self, own: Checksums) -> dict[str, str]:
        return {group: xxhash.xxh3_128_hexdigest(own[indices].data) for group, indices in self._groups.items()}
