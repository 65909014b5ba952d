"""Batch normalisation in PyTorch over as many images as a recipe says; see hpctrain.worker.models.keras_batch_norm."""

from __future__ import annotations

from typing import Any, Self

import torch
from torch import nn
from torch.nn import functional as F

from hpctrain.worker.comm.base import Communicator, Group
from hpctrain.worker.comm.group_sum import channel_statistics
from hpctrain.worker.models.batch_norm import WHOLE, Extent, means_over_ranks, moved_by

# The outputs, the mean and the unbiased variance.
Normalised = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
_STATISTICS = ("running_mean", "running_var")


class TorchBatchNorm(nn.BatchNorm2d):
    """Ioffe and Szegedy 2015 (arXiv 1502.03167) for images (N, C, H, W), the statistics from ``extent``.

    Args:
        momentum: the share of the running statistics that is kept at each step: 1 less PyTorch's ``momentum``.
    """

    def __init__(self, channels: int, *, extent: Extent = WHOLE, momentum: float = 0.9, epsilon: float = 1e-5) -> None:
        super().__init__(channels, eps=epsilon, momentum=1 - momentum)
        self._kept = momentum
        self._extent = extent
        self._make_moved()

    def begin_part(self, number: int, count: int) -> None:
        """Say which part of a step comes next, from 1; all parts together move the running statistics once."""
        moved = moved_by(self._kept, number, count)
        if moved != self.momentum:
            self.momentum = moved
            # Where it is, as CUDA graphs find it there.
            self._moved.fill_(moved)

    def _make_moved(self) -> None:
        assert self.running_mean is not None
        assert self.momentum is not None
        # As a number it would be part of the code that a compiler makes, which each part of a step would need anew.
        self._moved = torch.full_like(self.running_mean[0], self.momentum)

    def _apply(self, *arguments: Any, **settings: Any) -> Self:
        super()._apply(*arguments, **settings)  # type: ignore[no-untyped-call]
        assert self.running_mean is not None
        self._make_moved()
        return self

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.training:
            return super().forward(x)
        part = self._extent.part or len(x)
        whole, rest = divmod(len(x), count := -(-len(x) // part))
        # Not tensor_split, whose backward pass makes a tensor of the whole batch's size for each part.
        parts = x.split([whole + (number < rest) for number in range(count)]) if count > 1 else [x]
        outputs, means, variances = zip(*(self._normalised(part) for part in parts), strict=True)
        self._keep(torch.stack(means).mean(dim=0), torch.stack(variances).mean(dim=0))
        return torch.cat(outputs) if count > 1 else outputs[0]

    def _normalised(self, x: torch.Tensor) -> Normalised:
        # PyTorch's kernel refuses a single value per channel.
        if self._extent.group or x.numel() == self.num_features:
            normalised: Normalised = self._over_group(x, self._extent.group)
            return normalised
        mean, variance = x.new_zeros(2, self.num_features, dtype=self.weight.dtype)
        # With momentum 1 the kernel writes the part's own statistics to mean and variance.
        return F.batch_norm(x, mean, variance, self.weight, self.bias, True, 1.0, self.eps), mean, variance

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _over_group(self, x: torch.Tensor, group: Group | None) -> Normalised:
        wide = x.to(torch.promote_types(x.dtype, self.weight.dtype))
        mean, variance, values = channel_statistics(wide, group)
        scale = (variance + self.eps).rsqrt().to(wide.dtype) * self.weight
        normalised = (wide - _of_channels(mean.to(wide.dtype))) * _of_channels(scale) + _of_channels(self.bias)
        return normalised.to(x.dtype), mean.detach(), variance.detach() * values / (values - 1).clamp(min=1)

    @torch.no_grad()
    def _keep(self, mean: torch.Tensor, variance: torch.Tensor) -> None:
        assert self.running_mean is not None
        assert self.running_var is not None
        assert self.num_batches_tracked is not None
        self.running_mean.lerp_(mean.to(self.running_mean), self._moved)
        self.running_var.lerp_(variance.to(self.running_var), self._moved)
        self.num_batches_tracked += 1


def _of_channels(values: torch.Tensor) -> torch.Tensor:
    return values.view(1, -1, 1, 1)


def batch_norms(model: nn.Module) -> list[TorchBatchNorm]:
    """All batch norms of a model that are told which part of a step comes next."""
    return [module for module in model.modules() if isinstance(module, TorchBatchNorm)]


@torch.no_grad()
def average_statistics(model: nn.Module, comm: Communicator) -> None:
    """Replace the running statistics of all batch norms by their plain mean over the ranks. One small reduction.

    These are all buffers named ``running_mean`` and ``running_var``, as in PyTorch's own normalisations.
    """
    statistics = [buffer for name, buffer in model.named_buffers() if name.rpartition(".")[2] in _STATISTICS]
    means = means_over_ranks([buffer.double().cpu().numpy().ravel() for buffer in statistics], comm)
    for buffer, mean in zip(statistics, means, strict=True):
        buffer.copy_(torch.from_numpy(mean).view(buffer.shape))
