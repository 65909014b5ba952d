"""Reads the state in a checkpoint for the current number of ranks and the parts of arrays that a rank holds now."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpctrain.common.checkpoints.layout import MOMENTS, OWN, STATISTICS
from hpctrain.common.checkpoints.manifest import CheckpointManifest, read_manifest
from hpctrain.common.checkpoints.pieces import Box, Place, check_cover, damaged
from hpctrain.common.files.disk import read_error
from hpctrain.common.files.regular import open_regular

if TYPE_CHECKING:
    from numpy.typing import NDArray

# After the name of what is a rank's own: whose it is.
_WHOSE = re.compile(r"(.+)\.(\d{1,9})", re.DOTALL)


@dataclass(frozen=True, kw_only=True)
class Stored:
    """An array in a file: a piece of one, or a rank's own.

    Attributes:
        opened: the file as the library reads it, which is mapped into memory.
    """

    file: Path
    opened: Any
    key: str
    dtype: str
    place: Place


@dataclass(frozen=True)
class Index:
    """All arrays of a checkpoint.

    Attributes:
        common: by name, the pieces that make the whole array.
        own: arrays that belong to one rank alone, by name and rank.
    """

    common: dict[str, list[Stored]] = field(default_factory=dict)
    own: dict[str, dict[int, Stored]] = field(default_factory=dict)


def read_index(path: Path, manifest: CheckpointManifest) -> Index:
    """Look what is in a checkpoint."""
    index = Index()
    for name in manifest.files:
        for stored in _stored(path / name):
            match = _WHOSE.fullmatch(stored.key) if stored.key.startswith(OWN) else None
            if match:
                index.own.setdefault(match[1], {})[int(match[2])] = stored
            else:
                index.common.setdefault(stored.place.name, []).append(stored)
    check_cover((piece.place, str(piece.file)) for pieces in index.common.values() for piece in pieces)
    for name, (first, *others) in index.common.items():
        for piece in others:
            if piece.dtype != first.dtype:
                raise damaged(piece.file, f"{name!r} is of type {piece.dtype}, and of {first.dtype} in {first.file}")
    return index


def _stored(file: Path) -> Iterator[Stored]:
    """The arrays of a file. The library refuses headers whose arrays do not fill the file."""
    # Imported here because only those who look into checkpoints need it.
    from safetensors import SafetensorError, safe_open

    try:
        # A pipe or a device is refused, not waited for.
        open_regular(file).close()
        opened: Any = safe_open(file, framework="np")
        for key in opened.keys():  # noqa: SIM118 - no mapping
            array = opened.get_slice(key)
            place = Place.of(key, tuple(array.get_shape()))
            yield Stored(file=file, opened=opened, key=key, dtype=array.get_dtype(), place=place)
    except OSError as error:
        raise read_error(error, file, exit_code=1) from error
    except (SafetensorError, ValueError) as error:
        raise damaged(file, f"not what was written: {error}") from error


# State that differs by rank, and whose mean over the ranks another number of ranks starts from.
_HAS_MEAN = (STATISTICS, MOMENTS)


class SavedState(Mapping[str, "NDArray[Any]"]):
    """The state from which a rank continues: arrays by name, read on access.

    An array is whole, however it was divided when it was saved; :meth:`piece` reads a part of it, and of the files only
    what overlaps. What is a rank's own has no number after its name.
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
    """
    manifest = read_manifest(path)
    return manifest, SavedState(manifest, read_index(path, manifest), rank, ranks)
