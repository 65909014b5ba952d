"""Keras 3 on TensorFlow: gradients reduced inside the optimizer, callbacks for ``fit``, sharded data."""

from __future__ import annotations

from hpctrain.adapters.keras.callbacks import LearningRateSchedule, callbacks
from hpctrain.adapters.keras.mean_loss import mean_loss, sum_loss
from hpctrain.adapters.keras.optimizer import distribute
from hpctrain.adapters.keras.sharding import shard
from hpctrain.adapters.keras.strategy import coordinator, strategy
from hpctrain.models.keras_batch_norm import average_statistics

__all__ = [
    "LearningRateSchedule",
    "average_statistics",
    "callbacks",
    "coordinator",
    "distribute",
    "mean_loss",
    "shard",
    "strategy",
    "sum_loss",
]
