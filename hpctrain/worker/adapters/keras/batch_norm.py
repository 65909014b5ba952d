"""``keras.layers.BatchNormalization(synchronized=True)`` over all ranks."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from hpctrain.worker.adapters.keras.distribution import Distribution
from hpctrain.worker.adapters.keras.ranks import total


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
