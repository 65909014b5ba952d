"""What a rank of a pipeline computes of a batch, and the micro-batches that it is cut into."""

from __future__ import annotations

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
        divided: among how many ranks the rows of a batch of ``ht.shard`` are divided; 0 for plain tensors.
    """

    inputs: torch.Tensor
    target: torch.Tensor
    weight: float = 1.0
    divided: int = 0


def part_of(inputs: torch.Tensor, target: torch.Tensor) -> Part:
    """This rank's part of a batch. Collective where its rows are not divided evenly by ``ht.shard``.

    Raises:
        HpctrainError: the batch is empty, or has not one target per sample.
    """
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
        return Part(whole_of(inputs), whole_of(target), divided=1)
    return Part(rows_of(inputs, rows), rows_of(target, rows), rows.size * rows.ranks.size / rows.total, rows.ranks.size)


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
