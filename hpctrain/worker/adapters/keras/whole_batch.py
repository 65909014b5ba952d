"""Small messages between ranks within a step, eagerly or in a graph."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from hpctrain.common.errors import HpctrainError
from hpctrain.worker.adapters.keras.distribution import in_whole_batch, share_in_work
from hpctrain.worker.comm import Communicator, current
from hpctrain.worker.comm.base import AnyArray, Group
from hpctrain.worker.comm.graph_errors import original_errors_raised, preserve_errors
from hpctrain.worker.comm.rank_run import run

if TYPE_CHECKING:
    from hpctrain.worker.adapters.keras.distribution import Distribution


def group_of(comm: Communicator) -> Group:
    """All ranks as a group with connections of its own. Collective at its first call."""
    return comm.kept_group("summing over a group of ranks")


def in_step(function: Callable[[AnyArray], AnyArray], tensor: tf.Tensor) -> tf.Tensor:
    """Wrap ``function`` of a NumPy array, whose result has the same type, as an operation of a step."""

    def waited(array: AnyArray) -> AnyArray:
        with run.times.waits():
            return function(array)

    # Stateful, so that TensorFlow runs it in the order of the program, which is the same on every rank.
    with original_errors_raised():
        return tf.numpy_function(preserve_errors(waited), [tensor], tensor.dtype, stateful=True)


def total(comm: Communicator, tensor: tf.Tensor) -> tf.Tensor:
    """The sum over the ranks, in float64."""
    summed = in_step(lambda array: group_of(comm).allreduce(np.asarray(array)), tf.cast(tensor, tf.float64))
    return tf.ensure_shape(summed, tensor.shape)


def number_in_graph() -> int:
    """A number for a collective that no other in the same graph has, and that is the same on all ranks."""
    if tf.executing_eagerly():
        # One after the other.
        return 0
    graph = tf.compat.v1.get_default_graph()
    while getattr(graph, "outer_graph", None) is not None and hasattr(graph.outer_graph, "outer_graph"):
        graph = graph.outer_graph
    # Counted in the graph itself, which may be gone before another one gets its address.
    if not hasattr(graph, "_hpctrain_collectives"):
        graph._hpctrain_collectives = itertools.count()
    return int(next(graph._hpctrain_collectives))


class Rows(NamedTuple):
    """The rows that the ranks hold of tensors of a whole batch.

    Attributes:
        comm: the ranks.
        here: whether this rank holds rows; one that does not computes another rank's.
        weight: the factor with which this rank's gradients enter the mean over the ranks.
    """

    comm: Communicator
    here: tf.Tensor
    weight: tf.Tensor

    def gathered(self, values: Any) -> Any:
        """Nested tensors of this rank's rows, joined with those of all others; each rank gets its rows' gradients."""
        leaves = [self._joined(leaf) if has_rows(leaf) else leaf for leaf in keras.tree.flatten(values)]
        return keras.tree.pack_sequence_as(values, leaves)

    def _joined(self, given: Any) -> tf.Tensor:
        tensor = tf.convert_to_tensor(given)
        count = tf.where(self.here, tf.shape(tensor)[0], 0)
        counts = total(
            self.comm, tf.one_hot(self.comm.rank, self.comm.size, dtype=tf.float64) * tf.cast(count, "float64")
        )
        begin = tf.cast(tf.reduce_sum(counts[: self.comm.rank]), tf.int32)
        # Not every engine gathers booleans.
        sent = tf.cast(tensor, tf.int32) if tensor.dtype == tf.bool else tensor
        joined = tf.cast(self._gather(sent, count, begin), tensor.dtype)
        joined.set_shape([None, *tensor.shape[1:]])
        mask = getattr(given, "_keras_mask", None)
        if mask is not None:
            joined._keras_mask = self._joined(mask)
        return joined

    def _gather(self, tensor: tf.Tensor, count: tf.Tensor, begin: tf.Tensor) -> tf.Tensor:
        rows = tf.shape(tensor)[0]

        @tf.custom_gradient  # type: ignore[untyped-decorator]
        def gather(own: tf.Tensor) -> tuple[tf.Tensor, Any]:
            joined = self.comm.tensorflow().allgather(own[:count], f"hpctrain.rows.{number_in_graph()}")
            return joined, lambda upstream: self._scatter(upstream, rows, count, begin)

        return gather(tensor)

    def _scatter(self, tensor: tf.Tensor, rows: tf.Tensor, count: tf.Tensor, begin: tf.Tensor) -> tf.Tensor:
        """This rank's rows of the sum of all ranks' gradients, of which the mean over the ranks is taken later."""

        @tf.custom_gradient  # type: ignore[untyped-decorator]
        def scatter(whole: tf.Tensor) -> tuple[tf.Tensor, Any]:
            weight = tf.cast(self.weight, whole.dtype)
            (mean,) = self.comm.tensorflow().allreduce([whole * weight], f"hpctrain.upstream.{number_in_graph()}")
            own = tf.math.divide_no_nan(mean[begin : begin + count] * self.comm.size, weight)
            padded = tf.pad(own, [[0, rows - count], *([[0, 0]] * (len(own.shape) - 1))])
            return padded, lambda upstream: self._gather(upstream, count, begin)

        return scatter(tensor)


def has_rows(value: Any) -> bool:
    """Whether this is a tensor of numbers with a row for each sample, which can be gathered."""
    return isinstance(value, tf.Tensor) and value.dtype != tf.string and value.shape.rank != 0


def of_all_ranks(distribution: Distribution, values: Any) -> Any:
    """The nested tensors of this rank's samples, joined with those of all other ranks; within a step of ``fit``."""
    share = distribution.share
    assert share is not None
    return Rows(distribution.comm, share > 0, share).gathered(values)


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


def _of_all(part: Any, count: Any, share: Any, comm: Communicator) -> tf.Tensor:
    part = tf.convert_to_tensor(part)
    if part.shape.rank not in (0, None) and part.shape.num_elements() != 1:
        raise HpctrainError(
            "HT-not-one-number",
            "ht.mean_loss: the total is of shape {shape}, not one number",
            "give the sum over this rank's samples: tf.reduce_sum(…)",
            shape=tuple(part.shape),
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
        sums = total(comm, own) if ranks > 1 else own
        divisor = sums[1] if count is not None else tf.ones([], tf.float64)
        value = tf.reshape(tf.math.divide_no_nan(sums[0], divisor), tf.shape(summed))
        scale = tf.where(counts, tf.math.divide_no_nan(tf.cast(ranks, tf.float64), divisor * later), 0.0)

        def backward(upstream: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
            gradient = upstream * scale
            return gradient, tf.reshape(-value * gradient, tf.shape(counted))

        return value, backward

    found = mean(tf.cast(part, tf.float64), tf.cast(1.0 if count is None else count, tf.float64))
    return tf.cast(found, part.dtype)


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
