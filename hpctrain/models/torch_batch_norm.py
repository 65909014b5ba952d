"""Batch normalisation in PyTorch over as many images as a recipe says; hpctrain.models.keras_batch_norm is the same."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from hpctrain.comm.base import Communicator, Group
from hpctrain.models.batch_norm import WHOLE, Extent


class BatchNorm(nn.BatchNorm2d):
    """Ioffe and Szegedy 2015 (arXiv 1502.03167) for images (N, C, H, W), the statistics from ``extent``.

    Args:
        channels: C.
        extent: which images share their statistics.
        momentum: what is kept of the running statistics at each step, 1 less PyTorch's ``momentum``.
        epsilon: is added to the variance.
    """

    def __init__(self, channels: int, *, extent: Extent = WHOLE, momentum: float = 0.9, epsilon: float = 1e-5) -> None:
        super().__init__(channels, eps=epsilon, momentum=1 - momentum)
        self._extent = extent

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        part, group = self._extent.part, self._extent.group
        if self.training and group:
            return self._over_group(x, group)
        if self.training and part and len(x) > part:
            return self._in_parts(x, -(-len(x) // part))
        return super().forward(x)

    def _in_parts(self, x: torch.Tensor, count: int) -> torch.Tensor:
        means = x.new_zeros(count, self.num_features, dtype=self.weight.dtype)
        variances = torch.zeros_like(means)
        whole, rest = divmod(len(x), count)
        # Not tensor_split, whose gradients are as many tensors of the whole batch's size.
        sizes = [whole + (number < rest) for number in range(count)]
        # With momentum 1 the kernel leaves the part's own statistics.
        parts = [
            F.batch_norm(part, mean, variance, self.weight, self.bias, True, 1.0, self.eps)
            for part, mean, variance in zip(x.split(sizes), means, variances, strict=True)
        ]
        self._keep(means.mean(dim=0), variances.mean(dim=0))
        return torch.cat(parts)

    def _over_group(self, x: torch.Tensor, group: Group) -> torch.Tensor:
        wide = x.to(torch.promote_types(x.dtype, self.weight.dtype))
        variance, mean = torch.var_mean(wide, dim=(0, 2, 3), correction=0)
        # Squares less the square of the mean: only float64 has the digits for that.
        mean, square = mean.double(), (variance + mean.square()).double()
        values = mean.new_tensor([x.numel() // self.num_features])
        own = torch.cat([values * mean, values * square, values])
        total: torch.Tensor = _Sum.apply(own, group)  # type: ignore[no-untyped-call]
        values = total[-1]
        mean, square = (total[:-1] / values).view(2, -1)
        variance = square - mean.square()
        self._keep(mean.detach(), variance.detach() * values / (values - 1).clamp(min=1))
        scale = (variance + self.eps).rsqrt().to(wide.dtype) * self.weight
        normalised = (wide - _of_channels(mean.to(wide.dtype))) * _of_channels(scale) + _of_channels(self.bias)
        return normalised.to(x.dtype)

    @torch.no_grad()
    def _keep(self, mean: torch.Tensor, variance: torch.Tensor) -> None:
        assert self.running_mean is not None
        assert self.running_var is not None
        assert self.momentum is not None
        assert self.num_batches_tracked is not None
        self.running_mean.lerp_(mean.to(self.running_mean), self.momentum)
        self.running_var.lerp_(variance.to(self.running_var), self.momentum)
        self.num_batches_tracked += 1


class _Sum(torch.autograd.Function):
    """The sum over a group of ranks, whose gradient is the sum of all ranks' gradients."""

    @staticmethod
    def forward(ctx: Any, own: torch.Tensor, group: Group) -> torch.Tensor:
        ctx.group = group
        return group.allreduce_torch(own)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return ctx.group.allreduce_torch(gradients[0]), None


def _of_channels(values: torch.Tensor) -> torch.Tensor:
    return values.view(1, -1, 1, 1)


@torch.no_grad()
def average_statistics(model: nn.Module, comm: Communicator) -> None:
    """Replace the running statistics of all batch norms by their plain mean over the ranks. One small reduction.

    The mean of the ranks' variances, as of their means (Akiba et al. 2017, arXiv 1711.04325, section 3): what the
    layers normalised with in training varied about that, and not about the variance of all images together.
    """
    norms = [module for module in model.modules() if isinstance(module, nn.BatchNorm2d)]
    statistics = [tensor for norm in norms for tensor in (norm.running_mean, norm.running_var) if tensor is not None]
    if comm.size == 1 or not statistics:
        return
    means = comm.allreduce(np.concatenate([tensor.cpu().double().numpy() for tensor in statistics]), "mean")
    sizes = [tensor.numel() for tensor in statistics]
    for tensor, mean in zip(statistics, torch.from_numpy(means).split(sizes), strict=True):
        tensor.copy_(mean)
