"""The steps of ``fit`` and ``evaluate`` on each rank's part of a global batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from hpctrain.common.errors import HpctrainError
from hpctrain.worker.adapters.keras.distribution import Distribution
from hpctrain.worker.adapters.keras.losses import patch_compute_loss, whole_batch_losses
from hpctrain.worker.adapters.keras.metrics import (
    drop_foreign_samples,
    patch_metrics,
    results_of_all_ranks,
    whole_batch_logs,
    whole_batch_values,
)
from hpctrain.worker.adapters.keras.rank_batch import batch_of, is_part
from hpctrain.worker.adapters.keras.whole_batch import total
from hpctrain.worker.comm.graph_errors import original_errors_raised

Step = Callable[[Any], Any]


def patch_steps(model: keras.Model, distribution: Distribution) -> None:
    """Make ``fit`` and ``evaluate`` apply the shares of ``ht.shard``.

    A ``train_step`` of the user's own gets what the user's dataset held. The share weights the gradients where the
    tapes make them: loss and metrics are those of this rank's own samples, so that their sums over the ranks are those
    of the global batch.
    """
    patch_compute_loss(model, distribution)
    train, test, predict = model.train_step, model.test_step, model.predict_step

    def train_step(data: Any) -> Any:
        return _run(model, distribution, train, data) if is_part(data) else train(data)

    def test_step(data: Any) -> Any:
        return _run(model, distribution, test, data) if is_part(data) else test(data)

    def predict_step(data: Any) -> Any:
        if is_part(data):
            raise HpctrainError(
                "HT-argument-not-valid",
                "predict of a sharded dataset would give this rank's samples alone",
                "give predict the dataset that ht.shard was given",
            )
        return predict(data)

    model.train_step, model.test_step, model.predict_step = train_step, test_step, predict_step


def unwrap_errors(model: keras.Model) -> None:
    """Make ``fit`` and ``evaluate`` raise the error that an exchange or the guard raised inside their graphs.

    TensorFlow's own error hides the cause.
    """
    for name in ("train_function", "test_function"):
        setattr(model, f"make_{name}", _make_unwrapped(model, name))


def _make_unwrapped(model: keras.Model, name: str) -> Callable[..., None]:
    make = getattr(model, f"make_{name}")

    def unwrapping(function: Step) -> Step:
        def run(iterator: Any) -> Any:
            try:
                with original_errors_raised():
                    return function(iterator)
            except HpctrainError:
                # TensorFlow keeps a graph whose tracing an error ended, and would run it in the next call.
                setattr(model, name, None)
                raise

        return run

    def make_function(force: bool = False) -> None:
        if getattr(model, name) is None or force:
            make(force)
            setattr(model, name, unwrapping(getattr(model, name)))

    return make_function


def _is_own(model: keras.Model, step: Step) -> bool:
    """Whether what a step returns is the user's own."""
    made = (step, model.compute_metrics, model.get_metrics_result)
    return not all(each.__module__.startswith("keras.") for each in made)


def _run(model: keras.Model, distribution: Distribution, step: Step, data: Any) -> Any:
    batch = batch_of(data)
    with distribution.computing(data.share), whole_batch_values(distribution), whole_batch_losses(distribution):
        patch_metrics(model, distribution)
        patch_batch_norms(model, distribution)
        if distribution.comm.size == 1 or not _is_own(model, step):
            logs = step(batch)
        else:
            with results_of_all_ranks(model, distribution):
                logs = whole_batch_logs(distribution, step(batch))
        drop_foreign_samples(model, distribution)
    return logs


def patch_batch_norms(model: keras.Model, distribution: Distribution) -> None:
    """Make every synchronized batch normalisation of ``model`` use mean and variance over all ranks' samples.

    Keras asks TensorFlow's distribution strategy for the other replicas, and finds none.
    """
    if distribution.comm.size == 1:
        return
    for layer in model._flatten_layers():
        if isinstance(layer, keras.layers.BatchNormalization) and layer.synchronized and "_moments" not in vars(layer):
            layer._moments = _Moments(layer, distribution)


class _Moments:
    """Mean and variance of each channel over all samples of a global batch, each with the same weight.

    In a loop without ``fit``, a rank without a sample of its own computes another rank's, which counts as well.
    """

    def __init__(self, layer: keras.layers.BatchNormalization, distribution: Distribution) -> None:
        self._layer = layer
        self._distribution = distribution

    def __call__(self, inputs: tf.Tensor, mask: tf.Tensor | None) -> tuple[tf.Tensor, tf.Tensor]:
        axes = self._layer._reduction_axes
        channels = tf.shape(inputs)[self._layer.axis]
        if mask is None:
            count = tf.cast(tf.size(inputs) // channels, tf.float64)
            mean, variance = (tf.cast(each, tf.float64) for each in tf.nn.moments(inputs, axes))
            first, second, spare = count * mean, count * (variance + tf.square(mean)), 0.0
        else:
            known = tf.broadcast_to(tf.cast(mask[..., None], tf.float64), tf.shape(inputs))
            wide = tf.cast(inputs, tf.float64) * known
            count = tf.reduce_sum(known) / tf.cast(channels, tf.float64)
            first, second = tf.reduce_sum(wide, axes), tf.reduce_sum(tf.square(wide), axes)
            spare = keras.config.epsilon()  # as Keras divides masked sums
        sums = self._over_ranks(tf.concat([first, second, count[None]], axis=0))
        first, second, count = sums[:channels], sums[channels:-1], sums[-1]
        mean = first / (count + spare)
        variance = (second - 2 * mean * first + count * tf.square(mean)) / (count + spare)
        return tf.cast(mean, inputs.dtype), tf.cast(tf.maximum(variance, 0), inputs.dtype)

    def _over_ranks(self, own: tf.Tensor) -> tf.Tensor:
        comm, share = self._distribution.comm, self._distribution.share

        @tf.custom_gradient  # type: ignore[untyped-decorator]
        def summed(tensor: tf.Tensor) -> tuple[tf.Tensor, Any]:
            if share is None:
                return total(comm, tensor), lambda upstream: total(comm, upstream)
            weight = tf.cast(share, tf.float64)

            def backward(upstream: tf.Tensor) -> tf.Tensor:
                # The optimizer multiplies the result by this rank's share, but the upstream gradient is every rank's.
                return tf.math.divide_no_nan(total(comm, upstream * weight), weight)

            return total(comm, tensor * tf.cast(share > 0, tf.float64)), backward

        return summed(own)
