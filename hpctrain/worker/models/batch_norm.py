"""The images over which one rank's batch normalisation computes statistics; the same for all frameworks.

What the frameworks' layers have in common beside that: the running variance is the unbiased one (divided by the number
of values less one), as in PyTorch and cuDNN, which the published accuracies were measured with; Keras' own layer keeps
the biased one. And parts that a rank computes, side by side or one after another in a step, leave the plain mean of
their statistics, so that one rank with several parts ends an epoch with what as many ranks with one part each have
after their statistics are averaged.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hpctrain.common.recipes.batch_statistics import ranks_together
from hpctrain.common.recipes.schema import BatchNormSettings
from hpctrain.worker.comm.base import Communicator, Group


@dataclass(frozen=True, kw_only=True)
class Extent:
    """The images whose statistics a rank uses; by default all that it computes together.

    Attributes:
        part: a rank's images are normalised in the fewest parts of at most so many, which differ by one at most
            (ghost batch normalisation, Hoffer et al. 2017, arXiv 1705.08741).
        group: ranks that normalise all their images together (Ying et al. 2018, arXiv 1811.06992, section 4).
    """

    part: int | None = None
    group: Group | None = None


WHOLE = Extent()


def moved_by(momentum: float, number: int, count: int) -> float:
    """The step of the running statistics towards those of a step's ``number``-th part of ``count``, from 1.

    After the last part they have moved once, by 1 - ``momentum`` towards the plain mean of the parts.
    """
    return (1 - momentum) / (count - (1 - momentum) * (count - number))


def means_over_ranks(statistics: Sequence[NDArray[np.floating]], comm: Communicator) -> list[NDArray[np.floating]]:
    """The plain mean of each array over the ranks in float64, by one small reduction.

    Of the ranks' variances as of their means (Akiba et al. 2017, arXiv 1711.04325, section 3): what the layers
    normalised with in training varied about that, and not about the variance of all images together. Where they are
    equal on all ranks they keep their bits.
    """
    if comm.size == 1 or not statistics:
        return list(statistics)
    means = comm.allreduce(np.concatenate([array.astype(np.float64) for array in statistics]), "mean")
    return np.split(means, np.cumsum([len(array) for array in statistics])[:-1])


def extent(settings: BatchNormSettings, comm: Communicator | None = None, *, at_once: int = 1) -> Extent:
    """Resolve ``span`` for a rank. Collective over all ranks if ranks normalise together.

    Args:
        settings: of the recipe.
        comm: the ranks; None for one process.
        at_once: the most images that a rank computes at once. Needed where ``span`` is a number.

    Raises:
        HpctrainError: a span that is not a multiple of ``at_once``, or whose groups do not divide the ranks.
    """
    span, ranks = settings.span, comm.size if comm else 1
    together = ranks_together(span, at_once, ranks)
    if comm and together > 1:
        return Extent(group=comm.group(together if together < ranks else None))
    return Extent(part=span if isinstance(span, int) and span < at_once else None)
