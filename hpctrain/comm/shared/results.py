"""Memory for results that somebody else holds for a while, used again once they let go of it."""

from __future__ import annotations

import mmap
import weakref
from typing import Any

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]


class Results:
    """Private buffers that begin at a page. As many as are held at one time."""

    def __init__(self) -> None:
        self._buffers: list[tuple[mmap.mmap, weakref.ref[Bytes]]] = []

    def take(self, nbytes: int) -> Bytes:
        """Memory that is its holder's as long as the array, or any array made of it, is referred to."""
        free = [index for index, (memory, held) in enumerate(self._buffers) if held() is None and len(memory) >= nbytes]
        memory = self._buffers.pop(free[0])[0] if free else _map(nbytes)
        # NumPy lets every view of an array refer to that array where its memory is another object's.
        whole: NDArray[Any] = np.frombuffer(memory, dtype=np.uint8)
        self._buffers.append((memory, weakref.ref(whole)))
        return whole[:nbytes]


def _map(nbytes: int) -> mmap.mmap:
    return mmap.mmap(-1, max(nbytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
