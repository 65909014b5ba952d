"""TensorFlow tensors that travel on the control plane, in a graph or eagerly."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from hpctrain.worker.comm.graph_errors import original_errors_raised, preserve_errors

if TYPE_CHECKING:
    from hpctrain.worker.comm.mpi import MpiControl

Array = NDArray[Any]
Arrays = Sequence[Array]


class ControlTensorFlowEngine:
    """The collectives that need no data plane. The subclass adds the reduction of gradients."""

    def __init__(self, control: MpiControl) -> None:
        self._control = control
        self._compiled: dict[Any, Any] = {}

    def allgather(self, tensor: tf.Tensor, name: str) -> tf.Tensor:
        (joined,) = self._in_turn(self._join, [tensor], name)
        joined.set_shape([None, *tensor.shape[1:]])
        return joined

    def broadcast(self, variables: Sequence[tf.Variable], name: str) -> None:
        for variable in variables:
            value = np.array(variable.numpy())
            self._control.broadcast_bytes(value.reshape(-1).view(np.uint8))
            variable.assign(value)

    def _in_turn(
        self, function: Callable[[Arrays], list[Array]], tensors: list[tf.Tensor], key: object
    ) -> list[tf.Tensor]:
        """Apply a function of NumPy arrays to tensors, in a graph or eagerly; ``key`` identifies the function."""
        if not tf.executing_eagerly():
            return self._operation(function, tensors)
        if key not in self._compiled:
            # Compiled to a graph here too: outside one, numpy_function copies its arguments and results.
            operation = functools.partial(self._operation, function)
            self._compiled[key] = tf.function(operation, autograph=False, reduce_retracing=True)
        with original_errors_raised():
            return list(self._compiled[key](tensors))

    def _operation(self, function: Callable[[Arrays], list[Array]], tensors: list[tf.Tensor]) -> list[tf.Tensor]:
        @preserve_errors
        def call(*arrays: Any) -> list[Array]:
            # TensorFlow passes a tensor without dimensions as a NumPy scalar.
            return function([np.asarray(array) for array in arrays])

        # TensorFlow runs stateful operations in program order, the same on every rank, even where they do not depend
        # on each other.
        found = tf.numpy_function(call, tensors, [tensor.dtype for tensor in tensors], stateful=True)
        # Where a script runs functions eagerly, TensorFlow takes one result out of its list.
        return list(found) if isinstance(found, list | tuple) else [found]

    def _join(self, arrays: Arrays) -> list[Array]:
        return [np.concatenate(self._control.allgather_object(array)) for array in arrays]
