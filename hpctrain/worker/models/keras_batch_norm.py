"""Batch normalisation in Keras over as many images as a recipe says, as in hpctrain.worker.models.torch_batch_norm."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import tensorflow as tf

from hpctrain.worker.comm.base import Communicator, Group
from hpctrain.worker.comm.graph_errors import preserve_errors
from hpctrain.worker.models.batch_norm import WHOLE, Extent, means_over_ranks, moved_by

# The outputs, the mean and the unbiased variance.
Normalised = tuple[tf.Tensor, tf.Tensor, tf.Tensor]


class KerasBatchNorm(keras.layers.BatchNormalization):  # type: ignore[misc]
    """Ioffe and Szegedy 2015 (arXiv 1502.03167) for images (N, H, W, C), the statistics from ``extent``.

    Args:
        momentum: the share of the running statistics that is kept at each step, in 0 to 1.
        settings: the other settings of Keras' own layer, such as ``name`` and ``gamma_initializer``.
    """

    def __init__(
        self, *, extent: Extent = WHOLE, momentum: float = 0.9, epsilon: float = 1e-5, **settings: Any
    ) -> None:
        super().__init__(momentum=momentum, epsilon=epsilon, **settings)
        self._extent = extent
        self._moved_by = 1 - momentum
        # Read by graphs. It is no variable of the model, and in float64, which is exact for Python's numbers.
        self._in_graphs = tf.Variable(self._moved_by, trainable=False, dtype=tf.float64)

    def begin_part(self, number: int, count: int) -> None:
        """Say which part of a step comes next, from 1; all parts together move the running statistics once."""
        before, self._moved_by = self._moved_by, moved_by(self.momentum, number, count)
        if self._moved_by != before:
            self._in_graphs.assign(self._moved_by)

    def call(self, inputs: tf.Tensor, training: bool | None = None) -> tf.Tensor:
        if not (training and self.trainable):
            return super().call(inputs, training=False)
        if self._extent.group:
            outputs, mean, variance = self._over_group(inputs, self._extent.group)
        elif self._extent.part:
            outputs, mean, variance = self._in_parts(inputs, self._extent.part)
        elif inputs.dtype == tf.float64:
            outputs, mean, variance = self._in_parts(inputs, None)
        else:
            outputs, mean, variance = self._whole(inputs)
        for kept, new in ((self.moving_mean, mean), (self.moving_variance, variance)):
            share = tf.cast(self._in_graphs, kept.dtype)
            kept.assign(kept * (1 - share) + tf.cast(new, kept.dtype) * share)
        return outputs

    def _whole(self, x: tf.Tensor) -> Normalised:
        # A fused kernel, without float64. Forward and backward, (32, 28, 28, 128) took 16 ms on two cores, and 51 ms in
        # Keras' own layer.
        outputs, mean, variance, *_ = tf.raw_ops.FusedBatchNormV3(
            x=x,
            scale=self.gamma.value,
            offset=self.beta.value,
            mean=[],
            variance=[],
            epsilon=self.epsilon,
            exponential_avg_factor=1.0,
        )
        return outputs, mean, variance

    def _in_parts(self, x: tf.Tensor, part: int | None) -> Normalised:
        """Normalise in the fewest parts of at most ``part`` images; a graph does not know the number of images."""
        images = tf.shape(x)[0]
        count = -(-images // part) if part else 1
        # The i-th part begins at image i * images / count, rounded like np.array_split.
        bounds = _bounds(images, count)
        numbers = tf.searchsorted(bounds, tf.range(images), side="right") - 1
        wide = tf.cast(x, tf.float64 if x.dtype == tf.float64 else tf.float32)
        area = tf.cast(tf.shape(x)[1] * tf.shape(x)[2], wide.dtype)
        values = tf.cast(bounds[1:] - bounds[:-1], wide.dtype)[:, None] * area

        def means(each: tf.Tensor) -> tf.Tensor:
            return tf.math.unsorted_segment_sum(tf.reduce_sum(each, axis=(1, 2)), numbers, count) / values

        mean = means(wide)
        centred = wide - tf.gather(mean, numbers)[:, None, None]
        variance = means(tf.square(centred))
        scale = tf.math.rsqrt(variance + self.epsilon) * tf.cast(self.gamma, wide.dtype)
        outputs = centred * tf.gather(scale, numbers)[:, None, None] + tf.cast(self.beta, wide.dtype)
        unbiased = variance * values / tf.maximum(values - 1, 1)
        return tf.cast(outputs, x.dtype), tf.reduce_mean(mean, axis=0), tf.reduce_mean(unbiased, axis=0)

    def _over_group(self, x: tf.Tensor, group: Group) -> Normalised:
        wide = tf.cast(x, tf.float64 if x.dtype == tf.float64 else tf.float32)
        mean, variance = tf.nn.moments(wide, axes=(0, 1, 2))
        # The mean square less the square of the mean, whose cancellation needs float64.
        mean, square = (tf.cast(each, tf.float64) for each in (mean, variance + tf.square(mean)))
        values = tf.cast(tf.size(x) // tf.shape(x)[3], tf.float64)
        total = _sum(tf.concat([values * mean, values * square, [values]], axis=0), group)
        values = total[-1]
        mean, square = tf.split(total[:-1] / values, 2)
        variance = square - tf.square(mean)
        scale = tf.cast(tf.math.rsqrt(variance + self.epsilon), wide.dtype) * tf.cast(self.gamma, wide.dtype)
        outputs = (wide - tf.cast(mean, wide.dtype)) * scale + tf.cast(self.beta, wide.dtype)
        return tf.cast(outputs, x.dtype), mean, variance * values / tf.maximum(values - 1, 1)


def _bounds(images: tf.Tensor, count: tf.Tensor) -> tf.Tensor:
    """Where parts that differ by one image at most begin, the larger ones first, and where the last one ends."""
    numbers = tf.range(count + 1)
    return numbers * (images // count) + tf.minimum(numbers, images % count)


def _sum(own: tf.Tensor, group: Group) -> tf.Tensor:
    """The sum over a group of ranks, whose gradient is the sum of all ranks' gradients."""

    def over_ranks(tensor: tf.Tensor) -> tf.Tensor:
        # TensorFlow runs stateful operations in program order, the same on every rank, even in branches that do not
        # depend on each other.
        total = tf.numpy_function(preserve_errors(group.allreduce), [tensor], tensor.dtype, stateful=True)
        return tf.ensure_shape(total, tensor.shape)

    @tf.custom_gradient  # type: ignore[untyped-decorator]
    def differentiable(tensor: tf.Tensor) -> tuple[tf.Tensor, Any]:
        return over_ranks(tensor), over_ranks

    return differentiable(own)


def begin_part(model: keras.Model, number: int, count: int) -> None:
    """Tell all batch norms which part of a step comes next: see :meth:`KerasBatchNorm.begin_part`."""
    for layer in model._flatten_layers():
        if isinstance(layer, KerasBatchNorm):
            layer.begin_part(number, count)


def average_statistics(model: keras.Model, comm: Communicator) -> None:
    """Replace the running statistics of all batch norms by their plain mean over the ranks. One small reduction."""
    layers = [layer for layer in model._flatten_layers() if isinstance(layer, keras.layers.BatchNormalization)]
    statistics = [variable for norm in layers if norm.built for variable in (norm.moving_mean, norm.moving_variance)]
    means = means_over_ranks([np.asarray(variable.value) for variable in statistics], comm)
    for variable, mean in zip(statistics, means, strict=True):
        variable.assign(mean)
