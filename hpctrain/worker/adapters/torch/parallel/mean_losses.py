"""Proves on the first micro-batches that a pipeline's loss is a mean over samples, by whose numbers they are weighted.

The loss of two micro-batches together has to be the mean of their own losses, weighted by their numbers of samples.
That is measured, so it holds for whatever the loss computes: a sum, a mean over tokens or by weights, and a loss that
compares samples differ.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch

from hpctrain.common.errors import HpctrainError

# How many losses are looked at: masks and weights may agree by chance in the first of them.
_CHECKED = 8
# By how much rounding changes a loss, relative to it, by the size of a number in bytes.
_ROUNDING = {2: 3e-2, 4: 1e-3, 8: 1e-6}


class _Part(NamedTuple):
    output: torch.Tensor
    target: torch.Tensor
    loss: float


def _form(part: _Part) -> tuple[object, ...]:
    """What has to be alike in micro-batches that are joined."""
    return part.output.shape[1:], part.output.dtype, part.target.shape[1:], part.target.dtype


class MeanLosses:
    """The check of a pipeline's loss function, which ends after a few micro-batches."""

    def __init__(self, loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
        self._loss = loss
        self._left = _CHECKED
        self._before: _Part | None = None

    @torch.no_grad()
    def check(self, output: torch.Tensor, target: torch.Tensor, found: torch.Tensor) -> None:
        """Refuse a loss that is no mean over samples.

        Args:
            output: of a micro-batch, without padding.
            target: its targets.
            found: its loss.

        Raises:
            HpctrainError: says how to state what the loss is divided by.
        """
        if not self._left or found.numel() != 1:
            return
        self._left -= 1
        own = _Part(output.detach(), target.detach(), float(found))
        before, self._before = self._before, own if self._left else None
        if before is None or _form(before) != _form(own):
            return
        generator = torch.default_generator.get_state()
        together = float(self._loss(torch.cat([before.output, own.output]), torch.cat([before.target, own.target])))
        if not torch.equal(torch.default_generator.get_state(), generator):  # a loss with random numbers
            torch.default_generator.set_state(generator)
            return
        samples = len(before.output), len(own.output)
        mean = (before.loss * samples[0] + own.loss * samples[1]) / sum(samples)
        tolerance = _ROUNDING.get(output.itemsize, 1e-3) * max(abs(mean), abs(together))
        # A micro-batch of masked samples alone has no mean.
        if not abs(together - mean) <= tolerance + 1e-12 and not math.isnan(together):
            raise HpctrainError(
                "HT-pipeline-loss-not-mean",
                "the loss of two micro-batches of a pipeline is {together:.6g} together, and {mean:.6g} as the mean of "
                "their own: it is no mean over samples, by whose numbers micro-batches are weighted",
                "let the loss return the sum, and give ht.Pipeline what the sum is divided by: "
                "count=lambda target: (target != -100).sum(), or count=len",
                exit_code=1,
                together=together,
                mean=mean,
            )
