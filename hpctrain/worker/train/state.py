"""The state of a training, as checkpoints hold it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from hpctrain.common.checkpoints.layout import OWN, shares, writers
from hpctrain.common.checkpoints.pieces import Box, Piece, Place, check_cover
from hpctrain.worker.adapters.guard import Guard
from hpctrain.worker.comm import Communicator

State = dict[str, NDArray[Any]]

# The steps that the guard has counted, in the state of every trainer.
GUARD_STEPS = "guard.steps"


class LazyState(Mapping[str, NDArray[Any]]):
    """Arrays by name, some of which are made on access, since a rank saves only a part of them.

    Args:
        arrays: those that exist already.
        further: for each other array its size in bytes and the function that makes it.
        pieces: this rank's pieces of arrays that are not whole on every rank, because they are divided over ranks or
            held by some of them only, as the parameters of a pipeline's stage are. Ranks that hold the same elements
            hold equal ones. A rank may have no piece of an array; None says that no rank has a piece of any.

    Attributes:
        nbytes: the size of each whole array; only these are in the mapping.
    """

    def __init__(
        self,
        arrays: Mapping[str, NDArray[Any]],
        further: Mapping[str, tuple[int, Callable[[], NDArray[Any]]]] = {},
        pieces: Mapping[str, Sequence[Piece]] | None = None,
    ) -> None:
        self._arrays = arrays
        self._further = further
        self.pieces = pieces
        self.nbytes = {name: size for name, (size, _) in further.items()}
        self.nbytes |= {name: value.nbytes for name, value in arrays.items()}

    def __getitem__(self, name: str) -> NDArray[Any]:
        return self._arrays[name] if name in self._arrays else self._further[name][1]()

    def __iter__(self) -> Iterator[str]:
        return iter(self.nbytes)

    def __len__(self) -> int:
        return len(self.nbytes)


class Stateful(Protocol):
    """An object with a state.

    Attributes:
        before_update: called by all ranks in every step, and by :meth:`restore`, before anything in :meth:`state`
            changes except the rank's own values.
    """

    before_update: Callable[[], None]

    @property
    def guard(self) -> Guard:
        """The guard that proves that all ranks hold the same parameters.

        The optimizer's state is not compared. It follows from the same gradients, and if it differs, the next update
        makes the parameters differ; but a checkpoint of the step before then holds one rank's state.
        """

    def state(self) -> LazyState:
        """Everything that determines the bits of later steps; names that begin as in ``layout.OWN`` are this rank's.

        The arrays may share memory with the training, which changes them.
        """

    def restore(self, state: Mapping[str, NDArray[Any]]) -> None:
        """Continue from a state; a rank's own values may be missing.

        Arrays that were saved in pieces are whole in it. From a checkpoint it is a
        :class:`hpctrain.common.checkpoints.read.SavedState`, of which ``piece_of`` reads only a part.

        Raises:
            KeyError, RuntimeError, ValueError: it belongs to another model or optimizer.
        """


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
