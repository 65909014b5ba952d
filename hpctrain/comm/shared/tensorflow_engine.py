"""The MPI engine for TensorFlow."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from hpctrain.comm.base import TopK, Wire
from hpctrain.comm.graph_errors import noting, unwrapped
from hpctrain.comm.shared.reducer import Reducer, ReductionTask
from hpctrain.comm.shared.results import Results
from hpctrain.comm.shared.segments import LINE_BYTES

if TYPE_CHECKING:
    from hpctrain.comm.mpi import MpiControl

Array = NDArray[Any]
Arrays = Sequence[Array]


class _Staging:
    """Where the tensors of one call lie: those of one type side by side in a segment, reduced together.

    Attributes:
        views: the bytes of each tensor in shared memory.
        tasks: the reductions, one a type.
    """

    def __init__(self, reducer: Reducer, arrays: Arrays, name: str, wire: np.dtype[Any] | TopK | None) -> None:
        self.views: list[Array] = list(arrays)
        self.tasks: list[ReductionTask] = []
        for dtype in sorted({array.dtype for array in arrays}, key=str):
            members = [index for index, array in enumerate(arrays) if array.dtype == dtype]
            nbytes = sum(arrays[index].nbytes for index in members)
            own, task = reducer.stage(nbytes, dtype, f"{name}.{dtype}", wire)
            self.tasks.append(task)
            start = 0
            for index in members:
                self.views[index] = own[start : start + arrays[index].nbytes]
                start += arrays[index].nbytes


class MpiTensorFlowEngine:
    """Reduces TensorFlow tensors in the CPU's memory: one call for all gradients of a step."""

    def __init__(self, control: MpiControl, reducer: Reducer) -> None:
        self._control = control
        self._reducer = reducer
        self._staging: dict[Any, _Staging] = reducer.table()
        self._results = Results()
        self._compiled: dict[Any, Any] = {}

    def allreduce(self, tensors: Sequence[tf.Tensor], name: str, wire: Wire[tf.DType] = None) -> list[tf.Tensor]:
        travelling = wire if wire is None or isinstance(wire, TopK) else np.dtype(wire.as_numpy_dtype)
        mean = functools.partial(self._mean, name, travelling)
        means = self._in_turn(mean, list(tensors), (name, wire))
        for result, tensor in zip(means, tensors, strict=True):
            result.set_shape(tensor.shape)
        return means

    def allgather(self, tensor: tf.Tensor, name: str) -> tf.Tensor:
        (joined,) = self._in_turn(self._join, [tensor], name)
        joined.set_shape([None, *tensor.shape[1:]])
        return joined

    def minimum(self, tensor: tf.Tensor, name: str) -> tf.Tensor:
        (least,) = self._in_turn(self._least, [tensor], name)
        least.set_shape(tensor.shape)
        return least

    def broadcast(self, variables: Sequence[tf.Variable], name: str) -> None:
        for variable in variables:
            value = np.array(variable.numpy())
            self._control.broadcast_bytes(value.reshape(-1).view(np.uint8))
            variable.assign(value)

    def _in_turn(
        self, function: Callable[[Arrays], list[Array]], tensors: list[tf.Tensor], key: object
    ) -> list[tf.Tensor]:
        """``function`` of NumPy arrays for tensors, in a graph or eagerly; ``key`` tells it from other functions."""
        if not tf.executing_eagerly():
            return self._operation(function, tensors)
        if key not in self._compiled:
            # A graph here too: outside one, numpy_function copies all that it gives and gets.
            operation = functools.partial(self._operation, function)
            self._compiled[key] = tf.function(operation, autograph=False, reduce_retracing=True)
        with unwrapped():
            return list(self._compiled[key](tensors))

    def _operation(self, function: Callable[[Arrays], list[Array]], tensors: list[tf.Tensor]) -> list[tf.Tensor]:
        @noting
        def call(*arrays: Any) -> list[Array]:
            # TensorFlow makes a NumPy scalar of a tensor without dimensions.
            return function([np.asarray(array) for array in arrays])

        # Stateful, as it is: TensorFlow then runs it in the order of the program, the same on every rank, also beside
        # what it does not depend on.
        return list(tf.numpy_function(call, tensors, [tensor.dtype for tensor in tensors], stateful=True))

    def _least(self, arrays: Arrays) -> list[Array]:
        return [self._control.allreduce(array, "min") for array in arrays]

    def _join(self, arrays: Arrays) -> list[Array]:
        return [np.concatenate(self._control.allgather_object(array)) for array in arrays]

    def _mean(self, name: str, wire: np.dtype[Any] | TopK | None, arrays: Arrays) -> list[Array]:
        staging = self._staged(name, wire, arrays)
        for view, array in zip(staging.views, arrays, strict=True):
            view[:] = array.reshape(-1).view(np.uint8)
        for task in staging.tasks:
            self._reducer.worker.submit(task)
        for task in staging.tasks:
            task.wait()
        return self._copies(staging, arrays)

    def _staged(self, name: str, wire: np.dtype[Any] | TopK | None, arrays: Arrays) -> _Staging:
        key = (name, wire, *((array.dtype, array.nbytes) for array in arrays))
        if key not in self._staging:
            self._staging[key] = _Staging(self._reducer, arrays, name, wire)
        return self._staging[key]

    def _copies(self, staging: _Staging, like: Arrays) -> list[Array]:
        """The means in memory that TensorFlow may keep.

        It takes an array that begins at a cache line as it is, and whoever holds the tensor, a user's list of
        gradients too, holds that memory. Shared memory cannot be given away like that: the next step writes into it.
        """
        sizes = [-(-array.nbytes // LINE_BYTES) * LINE_BYTES for array in like]
        ends = np.cumsum(sizes, dtype=np.int64)
        memory = self._results.take(int(sum(sizes)))
        copies = []
        for view, array, begin in zip(staging.views, like, (ends - sizes).tolist(), strict=True):
            copy = memory[begin : begin + array.nbytes]
            copy[:] = view
            copies.append(copy.view(array.dtype).reshape(array.shape))
        return copies
