"""Losses that are divided by something other than the number of samples: by tokens, by weights, or by nothing.

A model that computes its loss has a part of the rows. The mean over the ranks of such losses is not that of the batch,
so sum and count are added up over the ranks instead, and each rank's sum gets the gradient that makes the mean over the
ranks that of the batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from hpctrain.common.errors import HpctrainError
from hpctrain.worker.adapters.data_ranks import data_place, is_first_of_data, mesh_of
from hpctrain.worker.adapters.torch.batch.ranks import known_ranks
from hpctrain.worker.adapters.torch.batch.tensor import running
from hpctrain.worker.comm import Communicator, current


def mean_loss(total: torch.Tensor, count: torch.Tensor | float, *, comm: Communicator | None = None) -> torch.Tensor:
    """The sum over the ranks of ``total``, divided by that of ``count``: see :func:`hpctrain.mean_loss`. Collective."""
    return _eagerly(comm or current(), "ht.mean_loss", total, count)


def sum_loss(total: torch.Tensor, *, comm: Communicator | None = None) -> torch.Tensor:
    """The sum over the ranks of ``total``: see :func:`hpctrain.sum_loss`. Collective."""
    return _eagerly(comm or current(), "ht.sum_loss", total, None)


def _over_ranks(comm: Communicator, name: str, total: Any, count: torch.Tensor | float | None) -> torch.Tensor:
    if not isinstance(total, torch.Tensor) or total.numel() != 1:
        form = f"shape {tuple(getattr(total, 'shape', ()))}"
        raise HpctrainError(
            "HT-not-one-number",
            "{call}: the total is of {form}, not one number",
            "give the sum over this rank's samples",
            call=name,
            form=form,
        )
    if mesh_of(comm).sizes["pp"] > 1:
        raise HpctrainError(
            "HT-mean-loss-in-pipeline",
            "{call}: the ranks of a pipeline's other stages do not compute the loss",
            "let the pipeline's loss return the sum, and give ht.Pipeline count=, a function of the targets",
            call=name,
        )
    if count is None and known_ranks() is not None and running.rows is None:
        return total  # the sum over a whole batch
    # Where nothing is counted, a mean that the script multiplied by it is not a number.
    number = 1.0 if count is None else _number(count)
    if not 0 <= number < math.inf:
        raise HpctrainError(
            "HT-argument-not-valid",
            "{call}: count={count:g} is not a number of at least 0",
            "give what this rank's part of the sum is divided by, such as its number of tokens",
            call=name,
            count=number,
        )
    counts = number > 0
    # Ranks of one tp group compute the same samples.
    sums = np.array([_number(total), number] if counts else [0.0, 0.0])
    sums *= is_first_of_data(comm)
    if comm.size > 1:
        sums = comm.allreduce(sums, "sum")
    divisor = float(sums[1]) if count is not None else 1.0
    mean = float(sums[0]) / divisor if divisor else 0.0
    # What the mean over the ranks will multiply the gradients by.
    later = 1 / data_place(comm).ranks
    scale = 1 / (divisor * later) if divisor and counts else 0.0
    divisor_tensor = count if isinstance(count, torch.Tensor) else None
    result: torch.Tensor = _OverRanks.apply(total, divisor_tensor, mean, scale)  # type: ignore[no-untyped-call]
    if running.rows is not None:
        running.rows.ranks.losses += 1
    return result


# Dynamo would trace into the engine, and cannot.
_eagerly: Callable[..., torch.Tensor] = torch.compiler.disable(_over_ranks)


def _number(value: torch.Tensor | float) -> float:
    return float(value.detach() if isinstance(value, torch.Tensor) else value)


class _OverRanks(torch.autograd.Function):
    """A number that is known, with the gradients of a sum and of what it is divided by."""

    @staticmethod
    def forward(ctx: Any, total: torch.Tensor, count: torch.Tensor | None, mean: float, scale: float) -> torch.Tensor:
        ctx.mean, ctx.scale = mean, scale
        return torch.full_like(total, mean)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        gradient = gradients[0] * ctx.scale
        return gradient, -ctx.mean * gradient if ctx.needs_input_grad[1] else None, None, None
