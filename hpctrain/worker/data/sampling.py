"""The samples of each rank: one global order per epoch, cut into global batches, each divided over the ranks.

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

# The bits of an index from this one on hold the repetition of a sample that comes several times, augmented anew.
_REPETITION = 40


@dataclass(frozen=True, kw_only=True)
class RankShare:
    """One rank's part of a global batch.

    Attributes:
        indices: the samples to compute, never empty: a rank without a sample of its own computes one of another rank's
            with weight 0, because it still has to take part in the reduction.
        count: how many of them are this rank's own.
        weight: the factor of the mean loss over ``indices`` with which the mean over the ranks is the mean over the
            global batch: count x ranks / samples of the batch.
    """

    indices: Indices
    count: int
    weight: float


def epoch_order(samples: int, *, seed: int, epoch: int, repeats: int = 1, length: int | None = None) -> Indices:
    """The permutation of ``range(samples)`` for one epoch.

    Args:
        repeats: how often each sample comes, one after the other; see :func:`sample_of` and :func:`repetition_of`.
        length: the number of samples after which the order is cut off.
    """
    order = np.random.default_rng((seed, epoch)).permutation(samples)
    if repeats == 1:
        return order
    return (order[:, None] + (np.arange(repeats) << _REPETITION)).ravel()[:length]


def endless_order(samples: int, *, seed: int, first: int, count: int) -> Indices:
    """``count`` places, from ``first`` on, of pass after pass over ``range(samples)`` in :func:`epoch_order`'s orders.

    Returns:
        Indices, each with the number of its pass as its repetition.
    """
    passes = range(first // samples, (first + count - 1) // samples + 1)
    orders = [epoch_order(samples, seed=seed, epoch=number) + (number << _REPETITION) for number in passes]
    begin = first - passes[0] * samples
    return np.concatenate(orders)[begin : begin + count]


def sample_of(order: Indices) -> Indices:
    """The indices of samples without their repetitions."""
    return order & ((1 << _REPETITION) - 1)


def repetition_of(order: Indices) -> Indices:
    """The number of each sample's repetition, from 0."""
    return order >> _REPETITION


def global_batches(order: Indices, size: int, *, drop_last: bool) -> Iterator[Indices]:
    """Cut ``order`` into batches of ``size``; the last may be smaller, and is left out with ``drop_last``.

    Repetitions of a sample are as far apart in a batch as possible: in the sources they are on different ranks, and are
    neither normalised nor mixed together.
    """
    for start in range(0, batch_count(len(order), size, drop_last=drop_last) * size, size):
        batch = order[start : start + size]
        yield batch[np.argsort(repetition_of(batch), kind="stable")]


def batch_count(samples: int, size: int, *, drop_last: bool) -> int:
    """The number of global batches in an epoch."""
    return samples // size if drop_last else -(-samples // size)


def part_of(samples: int, rank: int, ranks: int) -> slice:
    """Where the part of ``rank`` lies in a batch of ``samples``."""
    base, longer = divmod(samples, ranks)
    begin = rank * base + min(rank, longer)
    return slice(begin, begin + base + (rank < longer))


def share(batch: Indices, rank: int, ranks: int) -> RankShare:
    """The contiguous part of ``batch`` for ``rank``; the ranks' parts differ by one sample at most."""
    own = batch[part_of(len(batch), rank, ranks)]
    return RankShare(
        indices=own if len(own) else batch[:1],
        count=len(own),
        weight=len(own) * ranks / len(batch),
    )


def parts(own: RankShare, count: int) -> list[Indices]:
    """Cut a share into ``count`` parts whose sizes differ by at most one; none is empty.

    If there are fewer samples than parts, the last sample is repeated after the rank's own ``count``.
    """
    again = np.repeat(own.indices[-1:], max(0, count - len(own.indices)))
    return np.array_split(np.append(own.indices, again), count)


def cut(indices: Indices, size: int | None) -> list[Indices]:
    """Cut ``indices`` into the fewest parts of at most ``size``, none if they are empty; None keeps them whole."""
    if not len(indices):
        return []
    return np.array_split(indices, -(-len(indices) // size) if size else 1)
