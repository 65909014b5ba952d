"""One rank's share of a checkpoint: copied at once, so that training goes on, and then written to disk.

The file is a safetensors file (https://github.com/huggingface/safetensors#format). It is not written by that library,
which would copy everything again and keep other threads from running: the copy is laid out as the file is.
"""

from __future__ import annotations

import errno
import fcntl
import json
import math
import mmap
import os
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import xxhash

from hpctrain.common.checkpoints.manifest import FileRecord
from hpctrain.common.errors import HpctrainError
from hpctrain.common.files.regular import private

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Layout = tuple[tuple[str, np.dtype[Any], tuple[int, ...]], ...]

# safetensors' names of NumPy's types; bfloat16 is that of ml_dtypes.
TYPES = {
    "bool": "BOOL",
    "bfloat16": "BF16",
    **{f"float{bits}": f"F{bits}" for bits in (16, 32, 64)},
    **{f"int{bits}": f"I{bits}" for bits in (8, 16, 32, 64)},
    **{f"uint{bits}": f"U{bits}" for bits in (8, 16, 32, 64)},
}
_LENGTH_BYTES = 8
# Direct I/O needs a multiple of the disk's block size.
_BLOCK_BYTES = 4096
_PIECE_BYTES = 1 << 24


class CheckpointShare:
    """A copy of some tensors, in memory that is reused for the next copy of the same tensors.

    One thread may :meth:`fill` it while another writes it.
    """

    def __init__(self) -> None:
        self._layout: Layout | None = None
        # The content of the file, and for each tensor, in the file's order, a view of its bytes.
        self._content: NDArray[np.uint8]
        self._header: memoryview
        self._places: dict[str, tuple[NDArray[Any], memoryview]] = {}
        self._hash = xxhash.xxh3_128()
        # How many bytes of the content are copied; more than it has after a failure.
        self._there = 0.0
        self._further = threading.Condition()

    def prepare(self, tensors: Mapping[str, NDArray[Any]]) -> None:
        """Allocate memory for copies of these tensors. The previous copy must not be in use by a writer any more.

        Raises:
            HpctrainError: one is of a type that a checkpoint cannot hold.
        """
        layout = tuple((name, value.dtype, value.shape) for name, value in tensors.items())
        if layout != self._layout:
            self._lay_out(layout)
        self._there = len(self._header)

    def fill(self, tensors: Mapping[str, NDArray[Any]]) -> None:
        """Copy the tensors. They may change as soon as this returns."""
        import numpy as np

        end = math.inf
        try:
            # Copying and hashing release the GIL, so training continues meanwhile.
            self._hash = xxhash.xxh3_128(self._header)
            for name, (place, content) in self._places.items():
                np.copyto(place, tensors[name])
                # Hashed right after the copy, while most of it is still in a CPU cache.
                self._hash.update(content)
                self._advance(self._there + len(content))
            end = len(self._content)
        finally:
            self._advance(end)

    def write(self, path: Path) -> FileRecord:
        """Write the copy to a new file; returns the manifest's entry for it, once it is on disk.

        Raises:
            OSError: the disk is full, or refuses.
            RuntimeError: the copy was not made.
        """
        with open(path, "xb", buffering=0, opener=private) as file:
            write_through(file.fileno(), self._content.data, self._wait_for)
        return FileRecord(bytes=len(self._content), xxh128=self._hash.hexdigest())

    def _advance(self, there: float) -> None:
        with self._further:
            self._there = there
            self._further.notify_all()

    def _wait_for(self, end: int) -> None:
        with self._further:
            self._further.wait_for(lambda: self._there >= end)
            if self._there > len(self._content):
                raise RuntimeError("nothing to write: the copy in memory was not made")

    def _lay_out(self, layout: Layout) -> None:
        import numpy as np

        # The widest types first, so that each lies where its type has to.
        ordered = sorted(layout, key=lambda each: -each[1].itemsize)
        header, ranges, end = {}, [], 0
        for name, dtype, shape in ordered:
            begin, end = end, end + dtype.itemsize * int(np.prod(shape, dtype=np.int64))
            header[name] = {"dtype": _type(name, dtype), "shape": list(shape), "data_offsets": [begin, end]}
            ranges.append((begin, end))
        text = json.dumps(header).encode()
        text += b" " * (-(_LENGTH_BYTES + len(text)) % _BLOCK_BYTES)
        front = len(text).to_bytes(_LENGTH_BYTES, "little") + text
        self._content = blocks_of_memory(len(front) + end)
        self._content[: len(front)] = np.frombuffer(front, np.uint8)
        self._header = self._content.data[: len(front)]
        self._places = {}
        for (name, dtype, shape), (begin, end) in zip(ordered, ranges, strict=True):
            window = self._content[len(front) + begin : len(front) + end]
            self._places[name] = (window.view(dtype).reshape(shape), window.data)
        self._layout = layout


def _type(name: str, dtype: np.dtype[Any]) -> str:
    if dtype.name in TYPES:
        return TYPES[dtype.name]
    raise HpctrainError(
        "HT-checkpoint-cannot-hold-dtype",
        "a checkpoint cannot hold {name!r}: its type is {dtype}",
        f"it can hold {', '.join(TYPES)}",
        exit_code=1,
        name=name,
        dtype=dtype.name,
    )


def blocks_of_memory(nbytes: int) -> NDArray[np.uint8]:
    """Zeroed memory that begins at a block boundary of the disk."""
    import numpy as np

    # Shared pages, because direct I/O from private ones is not safe while the process forks (open(2)).
    memory = mmap.mmap(-1, max(nbytes, 1), flags=mmap.MAP_SHARED | mmap.MAP_ANONYMOUS)
    content: NDArray[np.uint8] = np.frombuffer(memory, np.uint8)[:nbytes]
    # Touched here, so that the first copy does not wait for page faults.
    content[:] = 0
    return content


def write_through(descriptor: int, content: memoryview, wait_for: Callable[[int], None] = lambda end: None) -> None:
    """Write to an empty file, and return when everything is on disk.

    Args:
        wait_for: called ahead of the writing of each piece, with where that ends.
        content: of :func:`blocks_of_memory`. Whole blocks go to the disk without a copy in the system's memory, where
            the file system can do that: the copy would take six times as much of the cores, which the training needs.

    Raises:
        OSError: the disk is full, or refuses.
    """
    usual = fcntl.fcntl(descriptor, fcntl.F_GETFL)
    try:
        fcntl.fcntl(descriptor, fcntl.F_SETFL, usual | os.O_DIRECT)
        _write_all(descriptor, content[: len(content) // _BLOCK_BYTES * _BLOCK_BYTES], wait_for)
    except OSError as error:
        # The file system has no direct I/O or wants larger blocks, or a full disk took part of a block.
        if error.errno != errno.EINVAL:
            raise
    fcntl.fcntl(descriptor, fcntl.F_SETFL, usual)
    _write_all(descriptor, content, wait_for)
    os.fsync(descriptor)


def _write_all(descriptor: int, content: memoryview, wait_for: Callable[[int], None]) -> None:
    """Write the rest of the content, from the file's current position on."""
    done = os.lseek(descriptor, 0, os.SEEK_CUR)
    while done < len(content):
        end = min(done + _PIECE_BYTES, len(content))
        wait_for(end)
        done += os.write(descriptor, content[done:end])
