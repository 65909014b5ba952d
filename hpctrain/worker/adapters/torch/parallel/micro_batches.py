"""The micro-batches that a rank of a pipeline computes, and proof that their losses are means over samples."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from hpctrain.common.errors import HpctrainError
from hpctrain.worker.adapters.torch.batch.tensor import BatchTensor, rows_of, whole_of


@dataclass(frozen=True)
class Part:
    """What this rank computes of a batch.

    Attributes:
        inputs: its rows.
        target: their targets.
        weight: the factor of their mean loss with which the mean over the ranks is that of the batch.
        shared: whether the ranks have one batch, of ``ht.shard``; plain tensors are each rank's own.
    """

    inputs: torch.Tensor
    target: torch.Tensor
    weight: float = 1.0
    shared: bool = False


def part_of(inputs: torch.Tensor, target: torch.Tensor) -> Part:
    """This rank's part of a batch. Collective where its rows are not divided evenly by ``ht.shard``."""
    if not len(inputs) or len(target) != len(inputs):
        raise HpctrainError(
            "HT-pipeline-different-samples",
            "a pipeline got {samples} inputs and {targets} targets, which it cuts into micro-batches together",
            "give one target per sample, along the first dimension; flatten them in the loss",
            exit_code=1,
            samples=len(inputs),
            targets=len(target),
        )
    batches = [each for each in (inputs, target) if isinstance(each, BatchTensor)]
    if not batches:
        return Part(inputs, target)
    rows = batches[0].rows.along(0)
    if 0 in rows.sizes:
        rows = rows.even()
    if 0 in rows.sizes:  # fewer samples than ranks: each computes all
        return Part(whole_of(inputs), whole_of(target), shared=True)
    return Part(rows_of(inputs, rows), rows_of(target, rows), rows.size * rows.ranks.size / rows.total, True)


@dataclass(frozen=True)
class MicroBatches:
    """A batch in micro-batches: their size, the padded targets, and for each its samples that count and its factor."""

    size: int
    target: torch.Tensor
    factors: list[tuple[int, float]]


def padded(tensor: torch.Tensor, rows: int) -> torch.Tensor:
    """The tensor with its last row repeated up to ``rows`` rows, contiguous."""
    missing = rows - len(tensor)
    rest = tensor[-1:].expand(missing, *tensor.shape[1:])
    return (torch.cat([tensor, rest]) if missing else tensor).contiguous()


# How many losses are compared: masks and weights may agree by chance in the first of them.
_CHECKED = 8
# By how much rounding changes a loss, relative to it, by the size of a number in bytes.
_ROUNDING = {2: 3e-2, 4: 1e-3, 8: 1e-6}


class MeanLosses:
    """The check of a pipeline's loss function, which ends after a few comparisons."""

    def __init__(self, loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
        self._loss = loss
        self._left = _CHECKED
        # The last micro-batch's outputs and targets.
        self._before: list[torch.Tensor] | None = None

    def begin(self) -> None:
        """A batch begins: losses before it had other parameters, where a part of the network is in the loss."""
        self._before = None

    @torch.no_grad()
    def check(self, output: torch.Tensor, target: torch.Tensor) -> None:
        """Refuse a loss that is no mean over samples, from a micro-batch without padding and the one before it."""
        if not self._left:
            return
        before, self._before = self._before, [output.detach(), target.detach()]
        parts = _two_parts(before, self._before)
        if parts is None:
            return
        self._left -= 1
        generator = torch.default_generator.get_state()
        own = [float(self._loss(*part)) for part in parts]
        together = float(self._loss(*(torch.cat(tensors) for tensors in zip(*parts, strict=True))))
        if not torch.equal(torch.default_generator.get_state(), generator):  # a loss with random numbers
            torch.default_generator.set_state(generator)
            return
        sizes = [len(part[0]) for part in parts]
        mean = sum(loss * size for loss, size in zip(own, sizes, strict=True)) / sum(sizes)
        tolerance = _ROUNDING.get(output.itemsize, 1e-3) * max(abs(mean), abs(together))
        # A micro-batch of masked samples alone has no mean.
        if not abs(together - mean) <= tolerance + 1e-12 and not math.isnan(together):
            raise HpctrainError(
                "HT-pipeline-loss-not-mean",
                "the loss of two parts of a pipeline's batch is {together:.6g} together, and {mean:.6g} as the mean of "
                "their own: it is no mean over samples, by whose numbers micro-batches are weighted",
                "let the loss return the sum, and give ht.Pipeline what the sum is divided by: "
                "count=lambda target: (target != -100).sum(), or count=len",
                exit_code=1,
                together=together,
                mean=mean,
            )


def _two_parts(before: list[torch.Tensor] | None, now: list[torch.Tensor]) -> Sequence[Sequence[torch.Tensor]] | None:
    """Outputs with targets, twice, that can be joined: of the last two micro-batches, or halves of a batch's first."""
    if before is not None:
        pairs = zip(before, now, strict=True)
        alike = all(one.shape[1:] == other.shape[1:] and one.dtype == other.dtype for one, other in pairs)
        return (before, now) if alike else None
    # A batch may be a single micro-batch. Some losses fail on a single sample.
    half = len(now[0]) // 2
    return list(zip(*(each.tensor_split([half]) for each in now), strict=True)) if half > 1 else None
