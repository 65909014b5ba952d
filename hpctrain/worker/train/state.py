"""The state of a training, as checkpoints hold it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

from numpy.typing import NDArray

from hpctrain.common.checkpoints.pieces import Piece
from hpctrain.worker.adapters.guard import Guard

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
