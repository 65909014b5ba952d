"""The state of a training in a checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

from numpy.typing import NDArray

from hpctrain.common.checkpoints.pieces import Piece
from hpctrain.worker.adapters.guard import Guard

State = dict[str, NDArray[Any]]

# What the guard has counted: part of the state of every trainer.
GUARD_STEPS = "guard.steps"


class LazyState(Mapping[str, NDArray[Any]]):
    """Arrays by name, some of which are made on access, since a rank saves only a part of all.

    Args:
        arrays: those that are there.
        further: how many bytes each of the others has, and what makes it.
        pieces: what this rank holds of arrays that are not the same on all ranks: divided over some of them, or held
            by some of them alone, as the parameters of a pipeline's stage are. Ranks that hold the same elements have
            equal ones. Nothing, or an array whose sequence is empty, is a piece too; None says that no rank has any.

    Attributes:
        nbytes: of each of the whole arrays, which alone are in the mapping.
        pieces: as given.
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
        before_update: called by all ranks in every step, ahead of every change of what :meth:`state` gives but for what
            is this rank's own; and by whoever restores a state.
    """

    before_update: Callable[[], None]

    @property
    def guard(self) -> Guard:
        """The guard that proves that all ranks hold the same parameters.

        What the optimizer keeps is not compared. It follows from the same gradients, and where it differs the next
        update makes parameters differ; but a checkpoint of the step before has one rank's.
        """

    def state(self) -> LazyState:
        """Everything that determines the bits of later steps; names that begin as in ``layout.OWN`` are this rank's.

        The arrays may be those that training goes on in.
        """

    def restore(self, state: Mapping[str, NDArray[Any]]) -> None:
        """Continue from a state; a rank's own values may be missing.

        Whole arrays and those of pieces alike are whole in it. Of a checkpoint it is a
        :class:`hpctrain.common.checkpoints.read.SavedState`, so that ``piece_of`` reads no more than a part.

        Raises:
            KeyError, RuntimeError, ValueError: it is of another model or optimizer.
        """
