"""Keras's training losses with mixed images and soft labels, the same as in hpctrain.worker.train.torch_losses."""

from __future__ import annotations

from typing import NamedTuple

import tensorflow as tf

from hpctrain.worker.data.mixing import Mixture
from hpctrain.worker.data.samples import BROKEN
from hpctrain.worker.train.trainer import RecipeLoss


class Mixed(NamedTuple):
    """A :class:`hpctrain.worker.data.mixing.Mixture` as tensors."""

    partners: tf.Tensor
    own: tf.Tensor
    other: tf.Tensor
    label: tf.Tensor
    boxes: tf.Tensor


# The signature of every mixture's tensors.
SIGNATURE = Mixed(
    partners=tf.TensorSpec((None,), tf.int64),
    own=tf.TensorSpec((None,), tf.float32),
    other=tf.TensorSpec((None,), tf.float32),
    label=tf.TensorSpec((None,), tf.float32),
    boxes=tf.TensorSpec((None, 4), tf.int64),
)


def tensors(mixture: Mixture) -> Mixed:
    """A mixture's arrays as tensors, to be given to a graph."""
    return Mixed(*(tf.constant(getattr(mixture, name)) for name in Mixed._fields))


def mixed(images: tf.Tensor, mixture: Mixed) -> tf.Tensor:
    """The first images of (M, height, width, channels), mixed with others of them."""
    partners = tf.gather(images, mixture.partners)
    own, other = (each[:, None, None, None] for each in (mixture.own, mixture.other))
    top, bottom, left, right = tf.unstack(mixture.boxes, axis=1)
    rows, columns = (tf.range(size, dtype=tf.int64) for size in tf.unstack(tf.shape(images, tf.int64))[1:3])
    inside = _between(rows, top, bottom)[:, :, None, None] & _between(columns, left, right)[:, None, :, None]
    return tf.where(inside, partners, own * images[: tf.shape(partners)[0]] + other * partners)


def _between(places: tf.Tensor, low: tf.Tensor, high: tf.Tensor) -> tf.Tensor:
    """Whether low <= place < high, shape (N, places)."""
    return (places >= low[:, None]) & (places < high[:, None])


class KerasLoss(RecipeLoss):
    """A recipe's loss in TensorFlow's operations."""

    def sum(self, logits: tf.Tensor, labels: tf.Tensor, mixture: Mixed | None) -> tf.Tensor:
        """The sum over all samples in float32; labels :data:`~hpctrain.worker.data.samples.BROKEN` do not count.

        Args:
            logits: any float type, shape (N, classes).
            labels: int64, shape (M,): those of the images before mixing.
            mixture: how the images were mixed; None where they were not.
        """
        logits = tf.cast(logits, tf.float32)
        if mixture is None and self.name == "cross_entropy":
            return tf.reduce_sum(cross_entropies(logits, labels, self.smoothing))
        targets = _targets(labels, mixture, logits.shape[1])
        known = tf.reduce_sum(targets, axis=1, keepdims=True)
        smoothed = (1 - self.smoothing) * targets + self.smoothing / logits.shape[1] * known
        if self.name == "cross_entropy":
            return -tf.reduce_sum(smoothed * tf.nn.log_softmax(logits))
        if self.threshold is not None:
            smoothed = tf.cast(smoothed > self.threshold, logits.dtype)
        each = tf.nn.sigmoid_cross_entropy_with_logits(smoothed, logits)
        return tf.reduce_sum(known * tf.reduce_mean(each, axis=1, keepdims=True))


def cross_entropies(logits: tf.Tensor, labels: tf.Tensor, smoothing: float = 0.0) -> tf.Tensor:
    """Cross entropy of each sample, 0 for one without a label: float32, whatever the logits are computed in."""
    known = labels != BROKEN
    logits = tf.cast(logits, tf.float32)
    losses = tf.nn.sparse_softmax_cross_entropy_with_logits(tf.where(known, labels, 0), logits)
    if smoothing:
        losses = (1 - smoothing) * losses - smoothing * tf.reduce_mean(tf.nn.log_softmax(logits), axis=1)
    return tf.where(known, losses, 0.0)


def _targets(labels: tf.Tensor, mixture: Mixed | None, classes: int) -> tf.Tensor:
    """Each class's share of a label, shape (N, classes); the shares add up to 1 less the share of broken samples."""
    # one_hot makes a row of zeros for BROKEN.
    targets = tf.one_hot(labels, classes)
    if mixture is None:
        return targets
    own = mixture.label[:, None]
    partners = tf.gather(targets, mixture.partners)
    return own * targets[: tf.shape(partners)[0]] + (1 - own) * partners
