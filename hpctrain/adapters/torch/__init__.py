"""The PyTorch adapter: gradients in, reduced gradients out."""

from __future__ import annotations

from hpctrain.adapters.torch.distribute import distribute, statistics
from hpctrain.adapters.torch.join import join
from hpctrain.adapters.torch.loader import shard
from hpctrain.adapters.torch.mean_loss import mean_loss, sum_loss
from hpctrain.adapters.torch.own_statistics import average_statistics
from hpctrain.adapters.torch.reducer import no_sync

__all__ = [
    "average_statistics",
    "distribute",
    "join",
    "mean_loss",
    "no_sync",
    "shard",
    "statistics",
    "sum_loss",
]
