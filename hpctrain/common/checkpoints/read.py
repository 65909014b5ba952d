"""Reads the state in a checkpoint for the current number of ranks and the parts of arrays that a rank holds now."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpctrain.common.checkpoints.index import Index, Stored, read_index
from hpctrain.common.checkpoints.layout import MOMENTS, STATISTICS
from hpctrain.common.checkpoints.manifest import CheckpointManifest, read_manifest
from hpctrain.common.checkpoints.pieces import Box, damaged

if TYPE_CHECKING:
    from numpy.typing import NDArray


# State that differs by rank, and whose mean over the ranks another number of ranks starts from.
_HAS_MEAN = (STATISTICS, MOMENTS)


class SavedState(Mapping[str, "NDArray[Any]"]):
    """The state from which a rank continues: arrays by name, read on access.

    An array is whole, however it was divided when it was saved; :meth:`piece` reads a part of it, and of the files only
    what overlaps. What is a rank's own has no number after its name.

    Raises:
        HpctrainError: a file cannot be read; from each access.
    """

    def __init__(self, manifest: CheckpointManifest, index: Index, rank: int, ranks: int) -> None:
        self._index = index
        self._before = manifest.progress.ranks
        self._rank, self._ranks = rank, ranks
        own = (
            name for name, values in index.own.items() if name.startswith(_HAS_MEAN) or rank % self._before in values
        )
        self._names = [*index.common, *own]
        self.shapes = {name: pieces[0].place.shape for name, pieces in index.common.items()}
        """Of the whole arrays that are common to all ranks, by name."""

    def __getitem__(self, name: str) -> NDArray[Any]:
        if name in self.shapes:
            return self.piece(name, Box.whole(self.shapes[name]))
        values = self._index.own[name]
        whose = self._rank % self._before
        if name.startswith(_HAS_MEAN) and not (self._ranks == self._before and whose in values):
            return self._mean(name, values)
        return self._read(values[whose])

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def piece(self, name: str, box: Box) -> NDArray[Any]:
        """A part of a common array.

        Raises:
            KeyError: there is no such array.
            ValueError: it has no such elements.
        """
        import numpy as np

        pieces = self._index.common[name]
        shape = self.shapes[name]
        if not box.lies_in(shape):
            raise ValueError(f"{name!r} has shape {list(shape)}, so there is no part {box} of it")
        for stored in pieces:
            if stored.place.box == box:
                return self._read(stored)
        nothing = self._read(pieces[0], (slice(0, 0),) * len(shape))
        found: NDArray[Any] = np.empty(box.lengths, nothing.dtype)
        for stored in pieces:
            if common := stored.place.box.common(box):
                found[common.within(box)] = self._read(stored, common.within(stored.place.box))
        return found

    def _read(self, stored: Stored, part: tuple[slice, ...] | None = None) -> NDArray[Any]:
        from safetensors import SafetensorError

        try:
            file = stored.opened
            array: NDArray[Any] = file.get_tensor(stored.key) if part is None else file.get_slice(stored.key)[part]
        except (SafetensorError, TypeError, ValueError) as error:
            raise damaged(stored.file, f"{stored.key!r} cannot be read: {error}") from error
        return array

    def _mean(self, name: str, values: Mapping[int, Stored]) -> NDArray[Any]:
        """The mean of the ranks' values, added up in rank order; for counters the first value."""
        import numpy as np

        ordered = [self._read(values[rank]) for rank in sorted(values)]
        # NumPy gives bfloat16 the kind "V".
        if ordered[0].dtype.kind in "biu":
            return ordered[0]
        try:
            mean: NDArray[Any] = np.mean(np.stack(ordered), axis=0, dtype=np.float64).astype(ordered[0].dtype)
        except (TypeError, ValueError) as error:
            raise damaged(values[min(values)].file.parent, f"the ranks' {name!r} differ: {error}") from error
        return mean


def shape_of(state: Mapping[str, NDArray[Any]], name: str) -> tuple[int, ...]:
    """The shape of an array of a state, saved or in memory, without reading it."""
    return state.shapes[name] if isinstance(state, SavedState) else state[name].shape


def piece_of(state: Mapping[str, NDArray[Any]], name: str, box: Box) -> NDArray[Any]:
    """A part of an array of a state, saved or in memory."""
    if isinstance(state, SavedState):
        return state.piece(name, box)
    import numpy as np

    # Indexing an array without dimensions would give a number.
    return np.asarray(state[name][box.within(Box.whole(state[name].shape))])


def read_state(path: Path, rank: int, ranks: int) -> tuple[CheckpointManifest, SavedState]:
    """The state from which a rank continues.

    Other ranks than those that were have the mean of their statistics, which is what batch normalisation is validated
    with, and the mean of what their optimizers kept. A rank that had none of some statistics has their mean, too.

    Args:
        path: a complete checkpoint (see :func:`hpctrain.common.checkpoints.find.verify`).
        rank, ranks: the number of the rank, and how many ranks there are now.
    """
    manifest = read_manifest(path)
    return manifest, SavedState(manifest, read_index(path, manifest), rank, ranks)
