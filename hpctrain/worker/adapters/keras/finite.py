"""Checks inside a TensorFlow graph that gradients are finite; each is read once."""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf


def all_finite(tensors: Sequence[tf.Tensor]) -> tf.Tensor:
    """Whether every element of all tensors is finite."""
    # A finite sum of squares proves all numbers finite. Squares of large finite numbers may overflow: check each then.
    squares = tf.add_n([tf.cast(tf.nn.l2_loss(tensor), tf.float32) for tensor in tensors])
    return tf.cond(
        tf.math.is_finite(squares),
        lambda: tf.constant(True),
        lambda: tf.reduce_all([tf.reduce_all(tf.math.is_finite(tensor)) for tensor in tensors]),
    )


def counts(tensors: Sequence[tf.Tensor]) -> tf.Tensor:
    """How many NaNs and how many infinities each tensor has: int64 of the shape (tensors, 2)."""
    kinds = (tf.math.is_nan, tf.math.is_inf)
    return tf.stack([tf.stack([tf.math.count_nonzero(kind(tensor)) for kind in kinds]) for tensor in tensors])
