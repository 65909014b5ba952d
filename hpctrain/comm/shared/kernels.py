"""Sums over the buffers of a node's ranks: always in the order of the ranks, 16-bit types in float32."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]

# Of one buffer at a time: the block of each rank stays in a core's second-level cache while it is added up and scaled.
BLOCK_BYTES = 131072


class Adder:
    """Adds up slices of buffers of one type, block by block."""

    def __init__(self, dtype: np.dtype[Any]) -> None:
        wide = np.dtype(np.float32) if dtype.itemsize == 2 else dtype
        self._wide = None if wide == dtype else wide
        self._scale_type = wide.type
        self._block = BLOCK_BYTES // wide.itemsize
        if self._wide:
            self._sum, self._term = (np.empty(self._block, dtype=wide) for _ in range(2))

    def sum(self, buffers: Sequence[Array], scale: float = 1.0) -> None:
        """Write ``scale`` x the sum of the buffers into the first of them, and spoil none of the others."""
        self._each_block(buffers, scale, spread=False)

    def mean(self, buffers: Sequence[Array], scale: float) -> None:
        """Write ``scale`` x the sum of the buffers into each of them."""
        self._each_block(buffers, scale, spread=True)

    def _each_block(self, buffers: Sequence[Array], scale: float, *, spread: bool) -> None:
        factor = self._scale_type(scale)
        add = self._add_wide if self._wide else self._add
        for start in range(0, len(buffers[0]), self._block):
            first, *others = (buffer[start : start + self._block] for buffer in buffers)
            add(first, others, factor)
            for other in others if spread else ():
                np.copyto(other, first)

    def _add(self, first: Array, others: Sequence[Array], factor: Any) -> None:
        for other in others:
            np.add(first, other, out=first)
        if factor != 1:
            np.multiply(first, factor, out=first)

    def _add_wide(self, first: Array, others: Sequence[Array], factor: Any) -> None:
        total, term = self._sum[: len(first)], self._term[: len(first)]
        np.copyto(total, first)
        for other in others:
            np.copyto(term, other)
            np.add(total, term, out=total)
        if factor != 1:
            np.multiply(total, factor, out=total)
        np.copyto(first, total, casting="unsafe")


def cut(length: int, parts: int, align: int) -> list[slice]:
    """``range(length)`` in contiguous parts that begin at multiples of ``align``; later ones may be empty."""
    step = -(-length // (parts * align)) * align
    return [slice(min(part * step, length), min((part + 1) * step, length)) for part in range(parts)]
