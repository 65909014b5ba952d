"""Over which images batch normalisation computes its statistics, worked out for one rank; the same for all frameworks.

What the frameworks' layers have in common beside that: the running variance is the unbiased one (divided by the number
of values less one), as in PyTorch and cuDNN, which the published accuracies were measured with; Keras' own layer keeps
the biased one. And parts that a rank computes side by side leave the plain mean of their statistics, so that one rank
with several parts ends an epoch with what as many ranks with one part each have after their statistics are averaged.
"""

from __future__ import annotations

from dataclasses import dataclass

from hpctrain.comm.base import Communicator, Group
from hpctrain.recipes.batch_statistics import ranks_together
from hpctrain.recipes.schema import BatchNorm


@dataclass(frozen=True, kw_only=True)
class Extent:
    """Where the statistics of one rank come from; by default from all images that it computes at once.

    Attributes:
        part: a rank's images are normalised in the fewest parts of at most so many, which differ by one at most
            (ghost batch normalisation, Hoffer et al. 2017, arXiv 1705.08741).
        group: ranks that normalise all their images together (Ying et al. 2018, arXiv 1811.06992, section 4).
    """

    part: int | None = None
    group: Group | None = None


WHOLE = Extent()


def extent(settings: BatchNorm, comm: Communicator | None = None, *, at_once: int | None = None) -> Extent:
    """What ``span`` comes to. Collective over all ranks where ranks normalise together.

    Args:
        settings: of the recipe.
        comm: the ranks; None for one process.
        at_once: the most images that a rank computes at once. Needed where ``span`` is a number.

    Raises:
        HpctrainError: a span that is no multiple of ``at_once``, or that asks for groups that do not divide the ranks.
    """
    ranks = comm.size if comm else 1
    if settings.span is None:
        return WHOLE
    if settings.span == "world":
        return Extent(group=comm.group() if comm and ranks > 1 else None)
    if at_once is None:
        raise ValueError("a span in images is for a known number of images that a rank computes at once")
    if settings.span <= at_once:
        return Extent(part=settings.span if settings.span < at_once else None)
    size = ranks_together(settings.span, at_once, ranks)
    assert comm is not None
    return Extent(group=comm.group(size))
