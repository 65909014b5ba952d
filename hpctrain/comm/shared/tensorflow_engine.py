"""The MPI engine for TensorFlow."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import tensorflow as tf

from hpctrain.comm.shared.reducer import Reducer, Task, Worker
from hpctrain.comm.shared.segments import Segment

if TYPE_CHECKING:
    from hpctrain.comm.mpi import MpiControl


class MpiTensorFlowEngine:
    """Reduces TensorFlow tensors in the CPU's memory: one call for all gradients of a step."""

    def __init__(self, control: MpiControl, reducer: Reducer, worker: Worker) -> None:
        self._control = control
        self._reducer = reducer
        self._worker = worker
        self._segments: dict[str, Segment] = {}

    def allreduce(self, tensors: Sequence[tf.Tensor], name: str, wire: tf.DType | None = None) -> list[tf.Tensor]:
        dtypes = [tensor.dtype for tensor in tensors]

        def reduce(*arrays: Any) -> list[Any]:
            return self._mean(arrays, name)

        reduced = tf.numpy_function(reduce, list(tensors), dtypes)
        for mean, tensor in zip(reduced, tensors, strict=True):
            mean.set_shape(tensor.shape)
        return list(reduced)

    def allgather(self, tensor: tf.Tensor, name: str) -> tf.Tensor:
        joined = tf.numpy_function(
            lambda own: np.concatenate(self._control.allgather_object(np.asarray(own))), [tensor], tensor.dtype
        )
        joined.set_shape([None, *tensor.shape[1:]])
        return joined

    def minimum(self, tensor: tf.Tensor, name: str) -> tf.Tensor:
        least = tf.numpy_function(lambda own: self._control.allreduce(np.asarray(own), "min"), [tensor], tensor.dtype)
        least.set_shape(tensor.shape)
        return least

    def broadcast(self, variables: Sequence[tf.Variable], name: str) -> None:
        for variable in variables:
            value = np.array(variable.numpy())
            self._control.broadcast_bytes(value.reshape(-1).view(np.uint8))
            variable.assign(value)

    def _mean(self, arrays: Sequence[Any], name: str) -> list[Any]:
        """The arrays of one type after another through one buffer each."""
        means: list[Any] = list(arrays)
        tasks = []
        for dtype in sorted({np.asarray(array).dtype for array in arrays}, key=str):
            members = [index for index, array in enumerate(arrays) if np.asarray(array).dtype == dtype]
            nbytes = sum(arrays[index].nbytes for index in members)
            segment = self._segment(f"{name}.{dtype}", nbytes)
            buffer = segment.own[:nbytes].view(dtype)
            start = 0
            for index in members:
                array = arrays[index]
                means[index] = buffer[start : start + array.size].reshape(array.shape)
                np.copyto(means[index], array)
                start += array.size
            task = Task(self._reducer, segment, 0, nbytes, dtype, name)
            self._worker.submit(task)
            tasks.append(task)
        for task in tasks:
            self._worker.wait(task)
        # TensorFlow may hold what it gets by reference, and the next step writes into the buffer.
        return [np.array(mean) for mean in means]

    def _segment(self, key: str, nbytes: int) -> Segment:
        if key not in self._segments or len(self._segments[key].own) < nbytes:
            self._segments[key] = self._reducer.allocate(nbytes)
        return self._segments[key]
