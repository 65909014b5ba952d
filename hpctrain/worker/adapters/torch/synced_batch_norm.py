"""``nn.SyncBatchNorm`` over the ranks of a communicator, with any engine.

PyTorch's own needs a GPU and torch.distributed, without which it normalises over this rank's samples alone. Here,
statistics are over all ranks' samples, each counted once.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from hpctrain.worker.adapters.torch.trainable import ranks_of
from hpctrain.worker.comm.base import Communicator
from hpctrain.worker.comm.group_sum import channel_statistics

_PURPOSE = "normalising a batch over the ranks"


def synchronise_batch_norms(comm: Communicator, model: nn.Module) -> None:
    """Make the synchronised batch norms of a model use these ranks. Collective.

    Those with a process group of the user's own are left to PyTorch.
    """
    norms = [each for each in model.modules() if isinstance(each, nn.SyncBatchNorm) and each.process_group is None]
    if comm.size == 1 or not norms:
        return
    comm.kept_group(_PURPOSE)
    for norm in norms:
        norm.__class__ = BatchNormOverRanks


class BatchNormOverRanks(nn.SyncBatchNorm):
    """Batch normalisation (Ioffe and Szegedy 2015, arXiv 1502.03167) over the samples of all ranks."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        # Saved as the user's own module, which loads without hpctrain. Protocol 2 does not allow another class.
        reduced: Any = super().__reduce_ex__(1)
        make, (_, *rest), *state = reduced
        return make, (nn.SyncBatchNorm, *rest), *state

    def __deepcopy__(self, memo: dict[int, Any]) -> BatchNormOverRanks:
        memo[id(self)] = own = BatchNormOverRanks.__new__(BatchNormOverRanks)
        own.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return own

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.training:
            return super().forward(x)
        comm = ranks_of(self)
        if comm is None:  # a copy, which ht.distribute did not get
            return nn.modules.batchnorm._BatchNorm.forward(self, x)
        self._check_input_dim(x)
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        mean, variance, count = channel_statistics(wide, comm.kept_group(_PURPOSE))
        self._keep(mean.detach(), variance.detach() * count / (count - 1).clamp(min=1))
        scale = (variance + self.eps).rsqrt().to(wide.dtype)
        normalised = (wide - self._of_channels(mean.to(wide.dtype), x)) * self._of_channels(scale, x)
        if self.affine:
            normalised = normalised * self._of_channels(self.weight, x) + self._of_channels(self.bias, x)
        return normalised.to(x.dtype)

    @torch.no_grad()
    def _keep(self, mean: torch.Tensor, variance: torch.Tensor) -> None:
        if self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
        if self.running_mean is None or self.running_var is None:
            return
        # The mean of all batches without a momentum, of which there is one where they are not counted.
        share: Any = self.momentum
        if share is None:
            share = 1.0 if self.num_batches_tracked is None else 1 / self.num_batches_tracked.to(self.running_mean)
        self.running_mean.lerp_(mean.to(self.running_mean), share)
        self.running_var.lerp_(variance.to(self.running_var), share)

    @staticmethod
    def _of_channels(values: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return values.view(1, -1, *[1] * (x.dim() - 2))
