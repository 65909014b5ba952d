"""Losses and tensors of the whole batch, for scripts that compute a loss by themselves."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from hpctrain.common.errors import HpctrainError
from hpctrain.worker.adapters.keras.distribution import in_whole_batch, share_in_work
from hpctrain.worker.adapters.keras.ranks import Rows
from hpctrain.worker.adapters.keras.ranks import total as over_ranks
from hpctrain.worker.comm import Communicator, current


def mean_loss(total: Any, count: Any, *, share: Any = None, comm: Communicator | None = None) -> tf.Tensor:
    """The sum over the ranks of ``total``, divided by the sum over the ranks of ``count``. Collective.

    For a ``train_step`` or ``compute_loss`` of your own, and for loops around ``GradientTape``, eagerly or in a graph.
    See :func:`hpctrain.mean_loss`::

        mask = tf.cast(labels != 0, each.dtype)
        loss = ht.mean_loss(tf.reduce_sum(each * mask), tf.reduce_sum(mask))

    Args:
        total: the sum over this rank's samples.
        count: what this rank's part of it is divided by.
        share: in a loop without ``fit``, what ``ht.shard`` yielded with the samples; do not multiply by it then.
        comm: the ranks; by default those that :func:`hpctrain.init` joined.
    """
    return _of_all(total, count, share, comm or current())


def sum_loss(total: Any, *, share: Any = None, comm: Communicator | None = None) -> tf.Tensor:
    """The sum over the ranks of ``total``. Collective. See :func:`mean_loss` for the arguments."""
    return _of_all(total, None, share, comm or current())


def _of_all(total: Any, count: Any, share: Any, comm: Communicator) -> tf.Tensor:
    total = tf.convert_to_tensor(total)
    if total.shape.rank not in (0, None) and total.shape.num_elements() != 1:
        raise HpctrainError(
            "HT-not-one-number",
            "ht.mean_loss: the total is of shape {shape}, not one number",
            "give the sum over this rank's samples: tf.reduce_sum(…)",
            shape=tuple(total.shape),
        )
    in_step = share_in_work()
    own_share = tf.cast(1.0 if share is None and in_step is None else in_step if share is None else share, tf.float64)
    # Where every rank computes the loss from the samples of all, the sum is complete.
    ranks = 1 if in_whole_batch() else comm.size
    # In a step of fit, the gradients are multiplied by the share later: divide by it here.
    later = own_share if in_step is not None else tf.ones([], tf.float64)

    @tf.custom_gradient  # type: ignore[untyped-decorator]
    def mean(summed: tf.Tensor, counted: tf.Tensor) -> tuple[tf.Tensor, Any]:
        # A rank without a sample of its own computes another rank's, which must not count; nor must a NaN of 0 / 0.
        counts = tf.logical_and(own_share > 0, counted > 0)
        own = tf.where(counts, tf.stack([tf.reshape(summed, []), tf.reshape(counted, [])]), 0.0)
        sums = over_ranks(comm, own) if ranks > 1 else own
        divisor = sums[1] if count is not None else tf.ones([], tf.float64)
        value = tf.reshape(tf.math.divide_no_nan(sums[0], divisor), tf.shape(summed))
        scale = tf.where(counts, tf.math.divide_no_nan(tf.cast(ranks, tf.float64), divisor * later), 0.0)

        def backward(upstream: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
            gradient = upstream * scale
            return gradient, tf.reshape(-value * gradient, tf.shape(counted))

        return value, backward

    found = mean(tf.cast(total, tf.float64), tf.cast(1.0 if count is None else count, tf.float64))
    return tf.cast(found, total.dtype)


def whole(*values: Any, share: Any = None, comm: Communicator | None = None) -> Any:
    """Tensors with the samples of all ranks, in the order of the ranks, that pass gradients back. Collective.

    For a ``train_step`` or a loop of your own whose loss is no mean over samples: a root of a mean, a variance, a
    comparison of samples, a sum that is divided by a constant. What is computed from whole tensors is computed on every
    rank, and its gradients are those of one process::

        def train_step(self, data):
            x, y = data
            with tf.GradientTape() as tape:
                y, y_pred = ht.keras.whole(y, self(x, training=True))
                loss = tf.sqrt(tf.reduce_mean(tf.square(y - y_pred)))
            gradients = tape.gradient(loss, self.trainable_variables)
            self.optimizer.apply(gradients, self.trainable_variables)
            return {"loss": loss}

    Give the model this rank's samples and its outputs to this function: a model computes whole tensors on every rank.
    Metrics count the samples of each rank: give them this rank's.

    Args:
        values: tensors whose first dimension is that of the samples, or nested lists and dictionaries of them. What
            else is among them (numbers, strings, None) comes back as it is.
        share: in a loop without ``fit``, what ``ht.shard`` yielded with the samples; do not multiply by it then.
        comm: the ranks; by default those that :func:`hpctrain.init` joined.

    Returns:
        One value if one was given, and a tuple otherwise.
    """
    comm = comm or current()
    found: Any = values
    if comm.size > 1 and not in_whole_batch():
        in_step = share_in_work()
        weight = tf.ones([], tf.float64) if in_step is None else in_step
        held = in_step if share is None else share
        found = Rows(comm, tf.constant(True) if held is None else tf.cast(held, tf.float64) > 0, weight).gathered(
            values
        )
    return tuple(found) if len(values) != 1 else found[0]
