"""Memory for results that others hold for a while, reused once they release it."""

from __future__ import annotations

import mmap
import weakref
from typing import Any

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]


class Results:
    """Private page-aligned buffers; there are as many as are held at one time."""

    def __init__(self) -> None:
        self._buffers: list[tuple[mmap.mmap, weakref.ref[Bytes]]] = []

    def take(self, nbytes: int) -> Bytes:
        """Memory that belongs to its holder as long as the array, or any view of it, is referenced."""
        free = [index for index, (memory, held) in enumerate(self._buffers) if held() is None and len(memory) >= nbytes]
        memory = self._buffers.pop(free[0])[0] if free else _map(nbytes)
        # NumPy lets every view of an array refer to that array where its memory is another object's.
        whole: NDArray[Any] = np.frombuffer(memory, dtype=np.uint8)
        self._buffers.append((memory, weakref.ref(whole)))
        return whole[:nbytes]


def _map(nbytes: int) -> mmap.mmap:
    return mmap.mmap(-1, max(nbytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
