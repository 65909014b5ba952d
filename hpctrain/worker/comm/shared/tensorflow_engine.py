"""The MPI engine for TensorFlow, and its tensors on the control plane, in a graph or eagerly."""

from __future__ import annotations

import functools
import mmap
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from hpctrain.worker.comm.graph_errors import original_errors_raised, preserve_errors
from hpctrain.worker.comm.rank_run import run
from hpctrain.worker.comm.shared.reducer import Reducer, ReductionTask
from hpctrain.worker.comm.shared.segments import LINE_BYTES, Bytes

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
        results = tf.numpy_function(call, tensors, [tensor.dtype for tensor in tensors], stateful=True)
        # Where a script runs functions eagerly, TensorFlow takes one result out of its list.
        return list(results) if isinstance(results, list | tuple) else [results]

    def _join(self, arrays: Arrays) -> list[Array]:
        with run.times.waits():
            return [np.concatenate(self._control.allgather_object(array)) for array in arrays]


class _Staging:
    """The shared memory for the tensors of one call: those of one type lie side by side, and are reduced together.

    Attributes:
        views: the bytes of each tensor in shared memory.
        tasks: the reductions, one per type.
    """

    def __init__(self, reducer: Reducer, arrays: Arrays, name: str, wire: np.dtype[Any] | None) -> None:
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


class MpiTensorFlowEngine(ControlTensorFlowEngine):
    """Reduces TensorFlow tensors in the CPU's memory: one call for all gradients of a step."""

    def __init__(self, control: MpiControl, reducer: Reducer) -> None:
        super().__init__(control)
        self._reducer = reducer
        self._staging: dict[Any, _Staging] = reducer.table()
        self._results = _ResultBuffers()

    def allreduce(self, tensors: Sequence[tf.Tensor], name: str, wire: tf.DType | None = None) -> list[tf.Tensor]:
        travelling = None if wire is None else np.dtype(wire.as_numpy_dtype)
        mean = functools.partial(self._mean, name, travelling)
        means = self._in_turn(mean, list(tensors), (name, wire))
        for result, tensor in zip(means, tensors, strict=True):
            result.set_shape(tensor.shape)
        return means

    def _mean(self, name: str, wire: np.dtype[Any] | None, arrays: Arrays) -> list[Array]:
        staging = self._staged(name, wire, arrays)
        for view, array in zip(staging.views, arrays, strict=True):
            view[:] = array.reshape(-1).view(np.uint8)
        with run.times.waits():
            for task in staging.tasks:
                self._reducer.worker.submit(task)
            for task in staging.tasks:
                task.wait()
        return self._copies(staging, arrays)

    def _staged(self, name: str, wire: np.dtype[Any] | None, arrays: Arrays) -> _Staging:
        key = (name, wire, *((array.dtype, array.nbytes) for array in arrays))
        if key not in self._staging:
            self._staging[key] = _Staging(self._reducer, arrays, name, wire)
        return self._staging[key]

    def _copies(self, staging: _Staging, like: Arrays) -> list[Array]:
        """The means in memory that TensorFlow may keep.

        TensorFlow does not copy an array that begins at a cache line, so its memory lives as long as any tensor made of
        it. Shared memory cannot be handed out like that: the next step writes into it.
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


class _ResultBuffers:
    """Private page-aligned memory for results, reused once nobody refers to it any more."""

    def __init__(self) -> None:
        self._buffers: list[tuple[mmap.mmap, weakref.ref[Bytes]]] = []

    def take(self, nbytes: int) -> Bytes:
        """Memory that stays the holder's as long as the array, or any view of it, is referenced."""
        free = [index for index, (memory, held) in enumerate(self._buffers) if held() is None and len(memory) >= nbytes]
        memory = self._buffers.pop(free[0])[0] if free else _map(nbytes)
        # Where an array's memory is another object's, every view keeps that very array alive.
        whole: NDArray[Any] = np.frombuffer(memory, dtype=np.uint8)
        self._buffers.append((memory, weakref.ref(whole)))
        return whole[:nbytes]


def _map(nbytes: int) -> mmap.mmap:
    return mmap.mmap(-1, max(nbytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
