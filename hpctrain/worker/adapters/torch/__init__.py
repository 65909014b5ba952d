"""The PyTorch adapter: gradients in, reduced gradients out."""

from __future__ import annotations

from hpctrain.worker.adapters.torch.distribute import distribute, statistics
from hpctrain.worker.adapters.torch.mean_loss import mean_loss, sum_loss
from hpctrain.worker.adapters.torch.reducer import no_sync
from hpctrain.worker.adapters.torch.sharded_loader import shard
from hpctrain.worker.models.torch_batch_norm import average_statistics

__all__ = [
    "average_statistics",
    "distribute",
    "mean_loss",
    "no_sync",
    "shard",
    "statistics",
    "sum_loss",
]
