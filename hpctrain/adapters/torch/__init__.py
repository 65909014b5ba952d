"""The PyTorch adapter: gradients in, reduced gradients out."""

from __future__ import annotations

from hpctrain.adapters.torch.distribute import distribute, statistics
from hpctrain.adapters.torch.loader import shard
from hpctrain.adapters.torch.reducer import no_sync

__all__ = ["distribute", "no_sync", "shard", "statistics"]
