"""The steps of ``fit`` and ``evaluate`` on the parts of global batches that ``shard`` yields."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from hpctrain.adapters.keras.reduction import Reduction
from hpctrain.comm.graph_errors import unwrapped
from hpctrain.errors import HpctrainError

Step = Callable[[Any], Any]
Part = tuple[Any, Any, tf.Tensor, tf.Tensor]


def take_shares(model: keras.Model, reduction: Reduction) -> None:
    """Let ``fit`` and ``evaluate`` take ``(x, y, sample_weight, share)``; other batches pass as they are.

    The share weights the gradients alone: loss and metrics are those of this rank's own samples, so that their sums
    over the ranks are those of the global batch.
    """
    train, test = model.train_step, model.test_step

    def train_step(data: Any) -> Any:
        _check_losses(model)
        if not _is_part(data):
            return train(data)
        reduction.share = data[-1]
        try:
            return _run(model, train, data)
        finally:
            reduction.share = None

    def test_step(data: Any) -> Any:
        return _run(model, test, data) if _is_part(data) else test(data)

    model.train_step, model.test_step = train_step, test_step


def unwrap_errors(model: keras.Model) -> None:
    """Let ``fit`` raise what a reduction or the guard raised inside its graph, and not TensorFlow's error about it."""
    make = model.make_train_function

    def make_train_function(force: bool = False) -> None:
        if model.train_function is None or force:
            make(force)
            model.train_function = unwrapped()(model.train_function)

    model.make_train_function = make_train_function


def _is_part(data: Any) -> bool:
    return isinstance(data, tuple) and len(data) == 4


def _run(model: keras.Model, step: Step, part: Part) -> Any:
    *batch, share = part
    # Keras makes a metric's variables at its first update, and the state before that update is needed below.
    model._symbolic_build(data_batch=tuple(batch))
    before = [tf.identity(variable.value) for variable in model.metrics_variables]
    logs = step(tuple(batch))
    # A rank without a sample of this batch computes another rank's, which must not count twice.
    for variable, old in zip(model.metrics_variables, before, strict=True):
        variable.assign(tf.where(share > 0, variable.value, old))
    return logs


def _check_losses(model: keras.Model) -> None:
    for loss in keras.tree.flatten(model.loss):
        reduction = getattr(loss, "reduction", "sum_over_batch_size")
        if reduction not in ("sum_over_batch_size", "mean"):
            raise HpctrainError(
                f"{type(loss).__name__} has reduction={reduction!r}, and the mean over the ranks of such a loss is not "
                "that of the global batch",
                'use reduction="sum_over_batch_size" or "mean"; where it was "sum", multiply the learning rate by the '
                "samples of a global batch",
            )
