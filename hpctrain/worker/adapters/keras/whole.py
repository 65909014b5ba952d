"""Tensors of a whole batch, for a script that computes a loss from them by itself."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from hpctrain.worker.adapters.keras.distribution import in_whole_batch, share_in_work
from hpctrain.worker.adapters.keras.ranks import Rows
from hpctrain.worker.comm import Communicator, current


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
