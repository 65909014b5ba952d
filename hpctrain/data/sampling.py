"""Which samples a rank trains on: one global order an epoch, cut into global batches, each cut over the ranks.

The order depends on the seed and the epoch alone, so a run on other ranks sees the same batches, and every
sample is seen exactly once an epoch for any number of ranks and any batch size (Goyal et al. 2017, section 2.3:
one global shuffle an epoch, then partition).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Indices = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class Share:
    """One rank's part of a global batch.

    Attributes:
        indices: the samples to compute, never empty: a rank without a sample of its own computes one of
            another rank's with weight 0, because it still has to take part in the reduction.
        count: how many of them are this rank's own.
        weight: what the mean loss over ``indices`` is multiplied by, so that the mean over the ranks is the mean
            over the global batch: count x ranks / samples of the batch.
    """

    indices: Indices
    count: int
    weight: float


def epoch_order(samples: int, *, seed: int, epoch: int) -> Indices:
    """The permutation of ``range(samples)`` for one epoch."""
    return np.random.default_rng((seed, epoch)).permutation(samples)


def global_batches(order: Indices, size: int, *, drop_last: bool) -> Iterator[Indices]:
    """``order`` cut into batches of ``size``; the last may be smaller, and is left out with ``drop_last``."""
    for start in range(0, batch_count(len(order), size, drop_last=drop_last) * size, size):
        yield order[start : start + size]


def batch_count(samples: int, size: int, *, drop_last: bool) -> int:
    """How many global batches an epoch has."""
    return samples // size if drop_last else -(-samples // size)


def share(batch: Indices, rank: int, ranks: int) -> Share:
    """The contiguous part of ``batch`` that is ``rank``'s; parts differ by one sample at most."""
    own = np.array_split(batch, ranks)[rank]
    return Share(
        indices=own if len(own) else batch[:1],
        count=len(own),
        weight=len(own) * ranks / len(batch),
    )


def parts(own: Share, count: int) -> list[Indices]:
    """A share in ``count`` parts, which differ by one sample at most and are never empty.

    Where there are fewer samples than parts the last one comes again, behind the rank's own ``count``.
    """
    again = np.repeat(own.indices[-1:], max(0, count - len(own.indices)))
    return np.array_split(np.append(own.indices, again), count)


def cut(indices: Indices, size: int | None) -> list[Indices]:
    """``indices`` in order, in the fewest parts of at most ``size``, which differ by one at most; None leaves it whole.

    What is empty has no part.
    """
    if not len(indices):
        return []
    return np.array_split(indices, -(-len(indices) // size) if size else 1)
