"""Sums of arrays in a fixed order; 16-bit types are added up in float32 and rounded once."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]

# The size of one rank's block: the blocks of all ranks stay in a core's second-level cache until the last pass.
BLOCK_BYTES = 131072


def add_up(out: Array, terms: Sequence[Array], factor: Array | None = None) -> None:
    """Write the sum of ``terms``, times ``factor`` if given, into ``out``, which may be the first of them.

    Args:
        out: any length; float16, bfloat16, float32 or float64, as the terms.
        factor: of the type :func:`sum_type`, as an array of no dimension, by which NumPy multiplies fastest.
    """
    if out.itemsize == 2:
        total, wide = np.empty(len(out), dtype=np.float32), np.empty(len(out), dtype=np.float32)
        convert(total, terms[0])
        for term in terms[1:]:
            convert(wide, term)
            np.add(total, wide, total)
        if factor is not None:
            np.multiply(total, factor, total)
        convert(out, total)
        return
    if len(terms) == 1:
        out[...] = terms[0]
    else:
        np.add(terms[0], terms[1], out)
        for term in terms[2:]:
            np.add(out, term, out)
    if factor is not None:
        np.multiply(out, factor, out)


def convert(target: Array, source: Array) -> None:
    """Copy into an array of another type, rounded to nearest.

    PyTorch converts float16 where it is loaded: NumPy does so one by one, which takes 30 times as long.
    """
    torch = sys.modules.get("torch")
    if torch and np.float16 in (target.dtype, source.dtype):
        torch.from_numpy(target).copy_(torch.from_numpy(source))
    else:
        np.copyto(target, source, casting="unsafe")


def sum_type(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """The type in which arrays of ``dtype`` are added up."""
    return np.dtype(np.float32) if dtype.itemsize == 2 else dtype


def cut(length: int, parts: int, align: int) -> list[slice]:
    """Split ``range(length)`` into contiguous parts that begin at multiples of ``align``; the last may be empty."""
    step = -(-length // (parts * align)) * align
    return [slice(min(part * step, length), min((part + 1) * step, length)) for part in range(parts)]


def blocks(arrays: Sequence[Array]) -> list[list[Array]]:
    """Split arrays of one length into blocks that fit into a cache."""
    step = BLOCK_BYTES // sum_type(arrays[0].dtype).itemsize
    return [[array[start : start + step] for array in arrays] for start in range(0, len(arrays[0]), step)]


class ThreadPool:
    """The threads of a rank, which share blocks. NumPy lets them compute at the same time."""

    # With fewer blocks, handing them to other threads takes longer than it saves.
    _LEAST_BLOCKS = 8

    def __init__(self, threads: int) -> None:
        self._threads = threads
        self._pool = ThreadPoolExecutor(threads - 1, "hpctrain-sum") if threads > 1 else None

    def each(self, work: Callable[[list[Array]], None], items: Sequence[list[Array]]) -> None:
        """Call ``work`` on each item, in any order."""
        if self._pool is None or len(items) < self._LEAST_BLOCKS:
            _each(work, items)
            return
        others = [self._pool.submit(_each, work, items[turn :: self._threads]) for turn in range(1, self._threads)]
        _each(work, items[:: self._threads])
        for other in others:
            other.result()

    def close(self) -> None:
        """End the threads."""
        if self._pool is not None:
            self._pool.shutdown()


def _each(work: Callable[[list[Array]], None], items: Iterable[list[Array]]) -> None:
    for item in items:
        work(item)
