"""Keras 3 on TensorFlow: gradients reduced inside the optimizer, callbacks for ``fit``, sharded data."""

from __future__ import annotations

from hpctrain.worker.adapters.keras.fitting import callbacks
from hpctrain.worker.adapters.keras.optimizer import distribute
from hpctrain.worker.adapters.keras.sharding import shard
from hpctrain.worker.adapters.keras.strategy import coordinator, strategy
from hpctrain.worker.adapters.keras.whole_batch import mean_loss, sum_loss, whole
from hpctrain.worker.models.keras_batch_norm import average_statistics

__all__ = [
    "average_statistics",
    "callbacks",
    "coordinator",
    "distribute",
    "mean_loss",
    "shard",
    "strategy",
    "sum_loss",
    "whole",
]
