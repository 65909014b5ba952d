"""Sums the largest elements of a slice over the nodes, and keeps the others for the next sum.

Source: Lin et al. 2018, Deep Gradient Compression (arXiv 1712.01887), section 3, without its momentum correction; error
feedback after Stich et al. 2018, Sparsified SGD with Memory (arXiv 1809.07599).
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from hpctrain.common.errors import HpctrainError
from hpctrain.worker.comm.shared.kernels import Array, all_finite, convert, sum_type

if TYPE_CHECKING:
    from hpctrain.worker.comm.base import TopK

# Among more elements the threshold is estimated: finding it exactly takes longer than sending a hundredth of them.
_SAMPLED = 1 << 16
_NOT_FINITE = -1
# Indices are sent in 32 bits.
_MOST_ELEMENTS = 1 << 32


class LargestElements:
    """One slice of this node, of which the largest elements are sent in each sum.

    What is not sent is added to the slice of the next sum, so that over many sums nothing is lost. If a slice is not
    finite, the result is not finite on any node, and the kept elements stay as they were. If the step is then skipped,
    what other slices sent in it is lost.

    Attributes:
        message: the bytes that this node sends.
        messages: a row for the message of each node.
        kept: the elements that were not sent yet, in the type :func:`sum_type`.
    """

    def __init__(self, own: Array, top: TopK, nodes: int) -> None:
        self._own = own
        self._begin = len(own) - top.exact
        self._most = min(self._begin, math.ceil(top.fraction * self._begin))
        self._total = np.empty(self._begin, dtype=sum_type(own.dtype))
        if self._begin > _MOST_ELEMENTS:
            raise HpctrainError(
                "HT-compression-slice-too-large",
                "a slice of {elements} elements is too large for compression top_k",
                "choose smaller buckets",
                elements=self._begin,
            )
        self._chosen: NDArray[np.intp] = np.empty(0, dtype=np.intp)
        self.kept: Array = np.zeros(self._begin, dtype=self._total.dtype)
        self.message: NDArray[np.uint8] = np.zeros(
            8 + 4 * self._most + (self._most + top.exact) * own.itemsize, dtype=np.uint8
        )
        self.messages: NDArray[np.uint8] = np.empty((nodes, len(self.message)), dtype=np.uint8)

    def pack(self) -> None:
        """Choose the elements to send, and write them to :attr:`message`."""
        count, indices, values, exact = self._parts(self.message)
        exact[:] = self._own[self._begin :]
        # self.kept must not change before all nodes' slices are known to be finite.
        convert(self._total, self._own[: self._begin])
        with np.errstate(over="ignore", invalid="ignore"):
            np.add(self.kept, self._total, self._total)
            if not all_finite(self._total):
                count[0] = _NOT_FINITE
                return
            self._chosen = largest(np.abs(self._total), self._most)
            sent = np.empty(len(self._chosen), dtype=self._own.dtype)
            convert(sent, self._total[self._chosen])
        if not all_finite(sent):
            count[0] = _NOT_FINITE
            return
        count[0] = len(sent)
        indices[: len(sent)] = self._chosen
        values[: len(sent)] = sent

    def unpack(self) -> None:
        """Replace the slice by the sum of :attr:`messages`, with the same bits on all nodes."""
        parts = [self._parts(message) for message in self.messages]
        own, exact = self._own[: self._begin], self._own[self._begin :]
        if any(count[0] == _NOT_FINITE for count, *_ in parts):
            own[:] = np.nan
        else:
            self._total[self._chosen] -= self._wide(self._parts(self.message)[2][: len(self._chosen)])
            self.kept, self._total = self._total, self.kept
            self._total[:] = 0
            for count, indices, values, _ in parts:
                number = int(count[0])
                # Fancy indexing adds once per index, which is enough: no index occurs twice in a message.
                self._total[indices[:number]] += self._wide(values[:number])
            convert(own, self._total)
        tail = np.zeros(len(exact), dtype=self._total.dtype)
        for *_, theirs in parts:
            tail += self._wide(theirs)
        convert(exact, tail)

    def _wide(self, values: Array) -> Array:
        """The values in the type :func:`sum_type`."""
        wide = np.empty(len(values), dtype=self._total.dtype)
        convert(wide, values)
        return wide

    def _parts(self, message: NDArray[np.uint8]) -> tuple[NDArray[np.int64], NDArray[np.uint32], Array, Array]:
        """The parts of a message: the number of elements, their indices, their values, and the exact elements."""
        values = message[8 + 4 * self._most :].view(self._own.dtype)
        return (
            message[:8].view(np.int64),
            message[8 : 8 + 4 * self._most].view(np.uint32),
            values[: self._most],
            values[self._most :],
        )


def largest(magnitudes: Array, most: int) -> NDArray[np.intp]:
    """The ascending indices of the largest elements of ``magnitudes``, all finite and none negative; at most ``most``.

    Among many elements fewer may be chosen, because the threshold is estimated from a sample.
    """
    if most >= len(magnitudes):
        return np.arange(len(magnitudes))
    if most == 0:
        return np.empty(0, dtype=np.intp)
    chosen = np.arange(len(magnitudes)) if len(magnitudes) <= _SAMPLED else _above(magnitudes, most)
    if len(chosen) > most:
        chosen = np.sort(chosen[np.argpartition(magnitudes[chosen], len(chosen) - most)[len(chosen) - most :]])
    return chosen


def _above(magnitudes: Array, most: int) -> NDArray[np.intp]:
    # A random sample, because elements at equal distances may be alike; with a fixed seed, for reproducible results.
    sample = magnitudes[np.random.default_rng(0).integers(len(magnitudes), size=_SAMPLED)]
    rank = len(sample) - max(1, round(len(sample) * most / len(magnitudes)))
    least = np.partition(sample, rank)[rank]
    # If the threshold is zero, most elements are zero, and all others can be sent.
    return np.flatnonzero(magnitudes >= least if least > 0 else magnitudes > 0)
