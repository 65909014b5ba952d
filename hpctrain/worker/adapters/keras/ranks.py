"""Small messages between ranks within a step, eagerly or in a graph."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import keras
import numpy as np
import tensorflow as tf

from hpctrain.worker.comm.base import AnyArray, Communicator, Group
from hpctrain.worker.comm.graph_errors import original_errors_raised, preserve_errors

if TYPE_CHECKING:
    from hpctrain.worker.adapters.keras.distribution import Distribution

# All models of a run share one group. It is kept with its size: the ranks that remain after a failure form a new one.
_GROUPS: weakref.WeakKeyDictionary[Communicator, tuple[int, Group]] = weakref.WeakKeyDictionary()


def group_of(comm: Communicator) -> Group:
    """All ranks as a group with connections of its own. Collective at its first call."""
    ranks, group = _GROUPS.get(comm, (0, None))
    if group is None or ranks != comm.size:
        group = comm.group()
        _GROUPS[comm] = comm.size, group
    return group


def in_step(function: Callable[[AnyArray], AnyArray], tensor: tf.Tensor) -> tf.Tensor:
    """Wrap ``function`` of a NumPy array, whose result has the same type, as an operation of a step."""
    # Stateful, so that TensorFlow runs it in the order of the program, which is the same on every rank.
    with original_errors_raised():
        return tf.numpy_function(preserve_errors(function), [tensor], tensor.dtype, stateful=True)


def total(comm: Communicator, tensor: tf.Tensor) -> tf.Tensor:
    """The sum over the ranks, in float64."""
    summed = in_step(lambda array: group_of(comm).allreduce(np.asarray(array)), tf.cast(tensor, tf.float64))
    return tf.ensure_shape(summed, tensor.shape)


def gathered(comm: Communicator, tensor: tf.Tensor, count: tf.Tensor, name: str) -> tf.Tensor:
    """The first ``count`` rows of every rank's tensor, joined; each rank gets the gradient of its own rows."""
    dtype = tensor.dtype

    @tf.custom_gradient  # type: ignore[untyped-decorator]
    def differentiable(own: tf.Tensor) -> tuple[tf.Tensor, Any]:
        counts = total(comm, tf.one_hot(comm.rank, comm.size, dtype=tf.float64) * tf.cast(count, tf.float64))
        begin = tf.cast(tf.reduce_sum(counts[: comm.rank]), tf.int32)
        joined = comm.tensorflow().allgather(own[:count], name)

        def backward(upstream: tf.Tensor) -> tf.Tensor:
            rows = upstream[begin : begin + count]
            return tf.pad(rows, [[0, tf.shape(own)[0] - count], *([[0, 0]] * (len(own.shape) - 1))])

        return joined, backward

    # Not every engine gathers booleans.
    return tf.cast(differentiable(tf.cast(tensor, tf.int32) if dtype == tf.bool else tensor), dtype)


def of_all_ranks(distribution: Distribution, values: Any) -> Any:
    """The nested tensors of this rank's samples, joined with those of all other ranks; within a step of ``fit``."""
    comm, share = distribution.comm, distribution.share
    assert share is not None
    # The same on every rank, in each graph of a step; two losses of one step may bear the same name.
    distribution.gathers += 1

    def joined(tensor: Any, name: str) -> tf.Tensor:
        tensor = tf.convert_to_tensor(tensor)
        count = tf.where(share > 0, tf.shape(tensor)[0], 0)
        together = gathered(comm, tensor, count, name)
        together.set_shape([None, *tensor.shape[1:]])
        mask = getattr(tensor, "_keras_mask", None)
        if mask is not None:
            together._keras_mask = gathered(comm, mask, count, f"{name}.mask")
        return together

    leaves = [
        leaf if leaf is None else joined(leaf, f"hpctrain.whole.{distribution.gathers}.{number}")
        for number, leaf in enumerate(keras.tree.flatten(values))
    ]
    return keras.tree.pack_sequence_as(values, leaves)
