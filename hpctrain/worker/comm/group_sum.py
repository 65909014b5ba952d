"""The sum of a PyTorch tensor over a group of ranks, with its gradient, for statistics that ranks have in common."""

from __future__ import annotations

from typing import Any

import torch

from hpctrain.worker.comm.base import Group


def group_sum(own: torch.Tensor, group: Group) -> torch.Tensor:
    """The sum over the ranks of a group, whose gradient is the sum of all ranks' gradients."""
    return _GroupSum.apply(own, group)  # type: ignore[no-untyped-call, no-any-return]


class _GroupSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, own: torch.Tensor, group: Group) -> torch.Tensor:
        ctx.group = group
        return group.allreduce_torch(own)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return ctx.group.allreduce_torch(gradients[0]), None
