"""Sums and statistics of PyTorch tensors over a group of ranks, with their gradients."""

from __future__ import annotations

from typing import Any

import torch

from hpctrain.worker.comm.base import Group


def channel_statistics(x: torch.Tensor, group: Group | None) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Mean, biased variance and number of the values of each channel, over a group's samples or this rank's.

    Args:
        x: float32 or float64, shape (N, C, …); the ranks' N may differ, and be 0.

    Returns:
        Mean and variance, float64, shape (C,), and the number, float64, shape (). It is 0 where all ranks' N are.
    """
    axes = [0, *range(2, x.dim())]
    count = x.new_full((1,), x.numel() // max(x.size(1), 1), dtype=torch.float64)
    if x.numel():
        variance, mean = (each.double() for each in torch.var_mean(x, dim=axes, correction=0))
    else:
        mean = variance = x.sum(axes).double()
    own = torch.cat([count * mean, count * (variance + mean.square()), count])
    total = _GroupSum.apply(own, group) if group else own  # type: ignore[no-untyped-call]
    count = total[-1].detach()
    # The mean square less the square of the mean, whose cancellation needs float64.
    mean, square = (total[:-1] / count).view(2, -1)
    return mean, (square - mean.square()).clamp(min=0), count


class _GroupSum(torch.autograd.Function):
    """The sum over the ranks of a group, whose gradient is the sum of all ranks' gradients."""

    @staticmethod
    def forward(ctx: Any, own: torch.Tensor, group: Group) -> torch.Tensor:
        ctx.group = group
        return group.allreduce_torch(own)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return ctx.group.allreduce_torch(gradients[0]), None
