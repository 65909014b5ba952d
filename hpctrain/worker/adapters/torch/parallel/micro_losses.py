"""Refuses a pipeline's losses that are not means over samples: micro-batches are weighted by their numbers of samples.

A mean over tokens, of which micro-batches have different numbers, needs the pipeline's ``count``.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from hpctrain.common.errors import HpctrainError
from hpctrain.worker.adapters.torch.divisors import Divided, divisors
from hpctrain.worker.adapters.torch.sums import divisor_problem

# The largest variance of equal numbers, relative to their squared mean: several times float32's error of 1 / count.
_VARIANCE = 1e-10
_HINT = (
    "let the loss return the sum, and give ht.Pipeline what the sum is divided by: "
    "count=lambda target: (target != -100).sum()"
)


class MicroLosses:
    """What the losses of one step's micro-batches are divided by, for each of their samples.

    The ranks add up its numbers together with the loss, and find unequal divisors by their variance.
    """

    def __init__(self) -> None:
        self._found: list[float] = []
        self._sums = 0

    def add(self, loss: torch.Tensor, samples: int) -> None:
        """Read the loss of a micro-batch of so many samples from autograd's graph."""
        if loss.grad_fn is None or loss.numel() != 1:
            return
        parts = [part for part, _ in divisors(loss.grad_fn)]
        self._sums += any(_is_no_mean(part, samples, alone=len(parts) == 1) for part in parts)
        # Other parts, such as penalties on weights, may not depend on the samples at all.
        certain = [part.divisor / samples for part in parts if part.exact]
        if certain:
            self._found.append(sum(place * each for place, each in enumerate(certain, start=1)))

    def numbers(self) -> NDArray[np.float64]:
        """Four numbers to add up over the ranks: their count, sum, sum of squares, and the number of sums."""
        own = np.array(self._found)
        return np.array([len(own), own.sum(), (own**2).sum(), self._sums])


def require_means(numbers: NDArray[np.float64]) -> None:
    """Refuse losses that are not means over samples, on any rank.

    Args:
        numbers: the sum over the ranks of :meth:`MicroLosses.numbers`.

    Raises:
        HpctrainError: the losses are divided by different counts for each sample, or are sums.
    """
    count, total, squares, sums = numbers
    if sums:
        raise HpctrainError(
            "HT-pipeline-loss-not-mean",
            "the loss of a pipeline is a sum that is not divided by the number of its samples",
            _HINT,
            exit_code=1,
        )
    if count and squares * count - total**2 > _VARIANCE * total**2:
        raise HpctrainError(
            "HT-pipeline-different-counts",
            "micro-batches of the pipeline divide their losses by different counts for each of their "
            "samples, so that their mean is not the mean of the batch",
            _HINT,
            exit_code=1,
        )


def _is_no_mean(part: Divided, samples: int, *, alone: bool) -> bool:
    """Whether a part is a sum over samples. A script's own arithmetic counts only as its loss's single part."""
    if part.is_sum and part.exact:
        undivided = samples == 1 and not any(each in (1, part.elements) for each in (part.unscaled, *part.over))
        return undivided or divisor_problem(part, samples=[samples], ranks=1, accumulated=1) is not None
    return part.is_sum and alone and part.unscaled <= 1 < samples
