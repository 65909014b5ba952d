"""What is in the files of a checkpoint: which pieces of which arrays, by their headers alone."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, Field, TypeAdapter, ValidationError

from hpctrain.common.checkpoints.layout import OWN
from hpctrain.common.checkpoints.manifest import CheckpointManifest
from hpctrain.common.checkpoints.pieces import Place, check_cover, damaged
from hpctrain.common.files.disk import read_error
from hpctrain.common.files.regular import open_regular

# After the name of what is a rank's own: whose it is.
_WHOSE = re.compile(r"(.+)\.(\d{1,9})", re.DOTALL)
_LENGTH_BYTES = 8
_ITEM_BYTES = {"BOOL": 1, "BF16": 2} | {f"{kind}{8 * size}": size for kind in "FIU" for size in (1, 2, 4, 8)}
# No reader of safetensors takes a longer one.
_LONGEST_HEADER = 100_000_000


# More is no place in a file.
_Count = Annotated[int, Field(ge=0, lt=2**62)]


class _Entry(BaseModel):
    """One entry of a safetensors header (https://github.com/huggingface/safetensors#format)."""

    dtype: str
    # No array of NumPy has more dimensions.
    shape: Annotated[tuple[_Count, ...], Field(max_length=64)]
    data_offsets: tuple[_Count, _Count]


_HEADER = TypeAdapter(dict[str, _Entry])


@dataclass(frozen=True, kw_only=True)
class Stored:
    """An array in a file: a piece of one, or a rank's own.

    Attributes:
        dtype: the name of its type there.
    """

    file: Path
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
    """Look what is in a checkpoint.

    Raises:
        HpctrainError: a file cannot be read, or pieces are missing, overlap, or are not what their keys say.
    """
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
    try:
        for key, entry in _header(file).items():
            yield Stored(file=file, key=key, dtype=entry.dtype, place=Place.of(key, entry.shape))
    except OSError as error:
        raise read_error(error, file, exit_code=1) from error
    except ValidationError as error:
        raise damaged(file, "its header is not that of a safetensors file") from error
    except ValueError as error:
        raise damaged(file, f"not what was written: {error}") from error


def _header(file: Path) -> dict[str, _Entry]:
    """Raises ValueError where the arrays do not fill the file: one would be read as what another is."""
    with open_regular(file) as opened:
        size = os.fstat(opened.fileno()).st_size
        length = int.from_bytes(opened.read(_LENGTH_BYTES), "little")
        # A damaged length must not ask for more than the file holds, nor a file with holes for all of it.
        header = _HEADER.validate_json(opened.read(min(length, size, _LONGEST_HEADER)))
    end = 0
    for key, entry in sorted(header.items(), key=lambda each: each[1].data_offsets):
        begin, there = entry.data_offsets
        nbytes = math.prod(entry.shape) * _ITEM_BYTES.get(entry.dtype, 0)
        if begin != end or there != begin + nbytes:
            raise ValueError(f"{key!r} is {entry.dtype} {list(entry.shape)} in bytes {begin} to {there} behind {end}")
        end = there
    if _LENGTH_BYTES + length + end != size:
        raise ValueError(f"it has {size} bytes, and its header says {_LENGTH_BYTES + length + end}")
    return header
