"""Reads single samples of a folder of shards (:mod:`hpctrain.common.shards.manifest`), in any order."""

from __future__ import annotations

import os
from functools import cached_property
from io import BufferedReader
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from hpctrain.common.errors import HpctrainError
from hpctrain.common.files.regular import open_regular
from hpctrain.common.shards.decoding import MOST_BYTES
from hpctrain.common.shards.manifest import (
    INDEX_ROW,
    ShardManifest,
    Split,
    SplitName,
    damaged,
    index_name,
    read_manifest,
    require_sizes,
)

# How many shards a process holds open: its limit is often 1,024, and its other files count too.
_OPEN_FILES = 256


class Shards:
    """One split of a folder of shards. Opens files on first use; pickled as its folder and name.

    For one thread at a time. Files that it opened stay open in a forked process, where they can be used too: no read
    moves them.

    Args:
        folder: what ``hpctrain data shard`` wrote.
        split: which set, ``train`` or ``val``.
    """

    def __init__(self, folder: Path, split: str) -> None:
        self.folder = folder
        self.split = split
        self._files: dict[int, BufferedReader] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        return Shards, (self.folder, self.split)

    @cached_property
    def manifest(self) -> ShardManifest:
        """The manifest of the folder."""
        return read_manifest(self.folder)

    @property
    def classes(self) -> tuple[str, ...]:
        """The WordNet identifiers by label."""
        return self.manifest.classes

    @property
    def fingerprint(self) -> str:
        """SHA-256 of the index."""
        return self._split.index_sha256

    @cached_property
    def labels(self) -> NDArray[np.int64]:
        """int64, shape (samples,)."""
        return self._index["label"].astype(np.int64)

    @cached_property
    def decodable(self) -> NDArray[np.int64]:
        """The samples but those that could not be decoded when the shards were made, by the manifest."""
        broken = [image.key.encode() for image in self.manifest.broken if image.split == self.split]
        return np.flatnonzero(~np.isin(self._index["key"], broken))

    def __len__(self) -> int:
        return len(self._index)

    def key(self, index: int) -> str:
        """The name of a sample in its archive."""
        return str(self._index["key"][index].decode(errors="replace"))

    def where(self, index: int) -> Path:
        """The shard that contains a sample."""
        return self.folder / self._split.shards[int(self._index["shard"][index])].name

    def read(self, index: int) -> bytes:
        """The image of a sample as stored: usually a JPEG file.

        Raises:
            HpctrainError: the shard is gone, cut short, or cannot be read.
        """
        shard, offset, size, *_ = self._index.item(index)
        try:
            content = os.pread(self._file(shard).fileno(), size, offset)
        except OSError as error:
            raise self._damaged(shard, error.strerror or str(error), index) from error
        if len(content) < size:
            raise self._damaged(shard, "cut short", index)
        return content

    def close(self) -> None:
        """Close the files. Idempotent; the next read opens them again."""
        while self._files:
            self._files.popitem()[1].close()

    def check(self) -> None:
        """Compare the sizes of the shards, and the index with its values, with the manifest.

        Raises:
            HpctrainError: the split, or one of its files, is not there or not whole.
        """
        require_sizes(self.folder, (shard.stored for shard in self._split.shards))
        if fault := index_fault(self._index, self._split, len(self.classes)):
            raise damaged(self.folder / index_name(self.split), fault)

    @property
    def _split(self) -> Split:
        # A manifest without one of the two is refused.
        return self.manifest.splits[cast("SplitName", self.split)]

    @cached_property
    def _index(self) -> NDArray[np.void]:
        # Mapped, so that the processes of a host share one copy.
        return read_index(self.folder / index_name(self.split))

    def _file(self, shard: int) -> BufferedReader:
        opened = self._files.get(shard)
        if opened is None:
            if len(self._files) == _OPEN_FILES:
                self._files.pop(next(iter(self._files))).close()
            opened = open_regular(self.folder / self._split.shards[shard].name)
            self._files[shard] = opened
        return opened

    def _damaged(self, shard: int, problem: str, index: int) -> HpctrainError:
        return damaged(self.folder / self._split.shards[shard].name, f"{problem}, at {self.key(index)}")


def open_shards(folder: Path, split: str) -> Shards:
    """Open a split after checking that all files are there with their sizes."""
    shards = Shards(folder, split)
    shards.check()
    return shards


def read_index(path: Path) -> NDArray[np.void]:
    """The rows of a split's samples, shape (samples,), of :data:`hpctrain.common.shards.manifest.INDEX_ROW`, mapped
    read-only.

    Raises:
        HpctrainError: it is not there, or is no index.
    """
    try:
        # A pipe or a device is refused, not waited for.
        open_regular(path).close()
        index: NDArray[np.void] = np.load(path, mmap_mode="r")
        if index.dtype != INDEX_ROW or index.ndim != 1:
            raise ValueError("not an index of shards")
    except Exception as error:
        # NumPy's reader of headers raises whatever its parsing stumbles over.
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise damaged(path, reason) from error
    return index


def index_fault(index: NDArray[np.void], split: Split, classes: int) -> str | None:
    """What in the rows of a split cannot be, None where nothing is found: that would be read beyond a shard, or as a
    label of no class.
    """
    if len(index) != split.samples:
        return f"{len(index)} samples where the manifest says {split.samples}"
    shard, offset, label = (index[name].astype(np.int64) for name in ("shard", "offset", "label"))
    sizes = np.array([file.bytes for file in split.shards])
    held = sizes[np.minimum(shard, len(sizes) - 1)]
    faults = {
        "a shard that is not there": shard >= len(sizes),
        "a place outside its shard": (offset < 0) | (offset > held) | (index["size"] > held - offset),
        f"an image of more than {MOST_BYTES} bytes": index["size"] > MOST_BYTES,
        f"a label beyond the {classes} classes": (label < 0) | (label >= classes),
    }
    for problem, rows in faults.items():
        if rows.any():
            return f"row {int(np.argmax(rows))} names {problem}"
    return None
