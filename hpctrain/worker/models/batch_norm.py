"""The images over which one rank's batch normalisation computes statistics; the same for all frameworks.

The layers of both frameworks also share two rules. The running variance is the unbiased one (divided by the number of
values less one), as in PyTorch and cuDNN, with which the published accuracies were measured; Keras' own layer keeps the
biased one. And the running statistics move towards the plain mean of the statistics of a step's parts, computed side by
side or one after another, so that one rank with several parts ends an epoch like as many ranks with one part each, once
their statistics are averaged.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hpctrain.common.recipes.requirements import ranks_together
from hpctrain.common.recipes.sections import BatchNormSettings
from hpctrain.worker.comm.base import Communicator, Group


@dataclass(frozen=True, kw_only=True)
class Extent:
    """The images that share their statistics; by default all that a rank computes together.

    Attributes:
        part: the most images in a part; a rank's images are cut into as few parts as possible, whose sizes differ by
            at most one (ghost batch normalisation, Hoffer et al. 2017, arXiv 1705.08741).
        group: ranks that normalise all their images together (Ying et al. 2018, arXiv 1811.06992, section 4).
    """

    part: int | None = None
    group: Group | None = None


WHOLE = Extent()


def moved_by(momentum: float, number: int, count: int) -> float:
    """By how much the running statistics move towards those of part ``number``, from 1, of a step's ``count``.

    After the last part they have moved by 1 - ``momentum`` towards the plain mean of the parts.
    """
    return (1 - momentum) / (count - (1 - momentum) * (count - number))


def means_over_ranks(statistics: Sequence[NDArray[np.floating]], comm: Communicator) -> list[NDArray[np.floating]]:
    """The plain mean of each array over the ranks in float64, by one small reduction.

    Variances are averaged like means (Akiba et al. 2017, arXiv 1711.04325, section 3): in training the layers
    normalised with variances about that mean, and not about the variance of all images together. Arrays that are equal
    on all ranks keep their bits.
    """
    if comm.size == 1 or not statistics:
        return list(statistics)
    means = comm.allreduce(np.concatenate([array.astype(np.float64) for array in statistics]), "mean")
    return np.split(means, np.cumsum([len(array) for array in statistics])[:-1])


def extent(settings: BatchNormSettings, comm: Communicator | None = None, *, at_once: int = 1) -> Extent:
    """Resolve ``settings.span`` for a rank. Collective over all ranks if they share batch statistics.

    Args:
        comm: the ranks; None for a single process.
        at_once: the most images that a rank computes at once. Needed where the span is a number.

    Raises:
        HpctrainError: a span that is not a multiple of ``at_once``, or whose groups do not divide the ranks.
    """
    span, ranks = settings.span, comm.size if comm else 1
    together = ranks_together(span, at_once, ranks)
    if comm and together > 1:
        return Extent(group=comm.group(together if together < ranks else None))
    return Extent(part=span if isinstance(span, int) and span < at_once else None)
