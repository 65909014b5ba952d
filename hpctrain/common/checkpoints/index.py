"""What is in the files of a checkpoint: which pieces of which arrays, by their headers alone."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hpctrain.common.checkpoints.layout import OWN
from hpctrain.common.checkpoints.manifest import CheckpointManifest
from hpctrain.common.checkpoints.pieces import Place, check_cover, damaged
from hpctrain.common.files.disk import read_error
from hpctrain.common.files.regular import open_regular

# After the name of what is a rank's own: whose it is.
_WHOSE = re.compile(r"(.+)\.(\d{1,9})", re.DOTALL)


@dataclass(frozen=True, kw_only=True)
class Stored:
    """An array in a file: a piece of one, or a rank's own.

    Attributes:
        dtype: the name of its type there.
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
