"""One rank's share of a checkpoint: copied in one go, so that training goes on, and written to disk after that.

The file is a safetensors file (https://github.com/huggingface/safetensors#format). It is not written by that library,
which would copy everything again and keep other threads from running: the copy is laid out as the file is.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from io import FileIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

import xxhash

from hpctrain.checkpoints.manifest import FileRecord
from hpctrain.errors import HpctrainError
from hpctrain.private_files import private

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Layout = tuple[tuple[str, np.dtype[Any], tuple[int, ...]], ...]

# safetensors' names of NumPy's types; bfloat16 is that of ml_dtypes.
_TYPES = {
    "bool": "BOOL",
    "bfloat16": "BF16",
    **{f"float{bits}": f"F{bits}" for bits in (16, 32, 64)},
    **{f"int{bits}": f"I{bits}" for bits in (8, 16, 32, 64)},
    **{f"uint{bits}": f"U{bits}" for bits in (8, 16, 32, 64)},
}
_ALIGNMENT = 8
_PIECE_BYTES = 1 << 24


class Share:
    """A copy of some tensors, in memory that is used again for the next one of the same tensors."""

    def __init__(self) -> None:
        self._layout: Layout | None = None
        self._header = b""
        self._data: NDArray[np.uint8]
        self._places: dict[str, NDArray[Any]] = {}

    def take(self, tensors: Mapping[str, NDArray[Any]]) -> None:
        """Copy these; they may change as soon as this returns. Nobody may write the copy of before any more.

        Raises:
            HpctrainError: one is of a type that a checkpoint cannot hold.
        """
        import numpy as np

        layout = tuple((name, value.dtype, value.shape) for name, value in tensors.items())
        if layout != self._layout:
            self._lay_out(layout)
        for name, value in tensors.items():
            np.copyto(self._places[name], value)

    def write(self, path: Path) -> FileRecord:
        """Write the copy to a new file; returns what the manifest says of it, once it is on disk.

        Raises:
            OSError: the disk is full, or refuses.
        """
        # Neither holds the interpreter's lock: the training goes on beside them.
        digest = xxhash.xxh3_128(self._header)
        digest.update(self._data.data)
        with _new(path) as file:
            write_through(file.fileno(), memoryview(self._header), self._data.data)
        return FileRecord(bytes=len(self._header) + len(self._data), xxh128=digest.hexdigest())

    def _lay_out(self, layout: Layout) -> None:
        import numpy as np

        # The widest types first, so that each lies where its type has to.
        ordered = sorted(layout, key=lambda each: -each[1].itemsize)
        header, places, end = {}, {}, 0
        for name, dtype, shape in ordered:
            begin, end = end, end + dtype.itemsize * int(np.prod(shape, dtype=np.int64))
            header[name] = {"dtype": _type(name, dtype), "shape": list(shape), "data_offsets": [begin, end]}
            places[name] = (begin, end, dtype, shape)
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % _ALIGNMENT)
        self._header = len(text).to_bytes(8, "little") + text
        # Zeros, so that the first copy does not wait for the system to find memory.
        self._data = np.full(end, 0, np.uint8)
        self._places = {
            name: self._data[begin:end].view(dtype).reshape(shape)
            for name, (begin, end, dtype, shape) in places.items()
        }
        self._layout = layout


def _new(path: Path) -> FileIO:
    return open(path, "xb", buffering=0, opener=private)


def _type(name: str, dtype: np.dtype[Any]) -> str:
    if dtype.name in _TYPES:
        return _TYPES[dtype.name]
    raise HpctrainError(
        f"a checkpoint cannot hold {name!r}: its type is {dtype.name}", f"it can hold {', '.join(_TYPES)}", exit_code=1
    )


def write_through(descriptor: int, *parts: memoryview) -> None:
    """Append bytes to a file, and return when they are on disk."""
    for part in parts:
        for start in range(0, len(part), _PIECE_BYTES):
            _write_all(descriptor, part[start : start + _PIECE_BYTES])
            # Lets the disk begin, and does not keep in memory what nobody reads soon: else all of it is written by
            # fsync, which takes longer.
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    os.fsync(descriptor)


def _write_all(descriptor: int, part: memoryview) -> None:
    while part:
        part = part[os.write(descriptor, part) :]
