"""Small messages between ranks within a step, eagerly or in a graph."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from hpctrain.worker.comm.base import AnyArray, Communicator, Group
from hpctrain.worker.comm.graph_errors import original_errors_raised, preserve_errors

if TYPE_CHECKING:
    from hpctrain.worker.adapters.keras.distribution import Distribution

# How many collectives each graph has got.
_CALLS: weakref.WeakKeyDictionary[Any, itertools.count[int]] = weakref.WeakKeyDictionary()


def group_of(comm: Communicator) -> Group:
    """All ranks as a group with connections of its own. Collective at its first call."""
    return comm.kept_group("summing over a group of ranks")


def in_step(function: Callable[[AnyArray], AnyArray], tensor: tf.Tensor) -> tf.Tensor:
    """Wrap ``function`` of a NumPy array, whose result has the same type, as an operation of a step."""
    # Stateful, so that TensorFlow runs it in the order of the program, which is the same on every rank.
    with original_errors_raised():
        return tf.numpy_function(preserve_errors(function), [tensor], tensor.dtype, stateful=True)


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
    return next(_CALLS.setdefault(graph, itertools.count()))


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
