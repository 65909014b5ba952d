"""Horovod's data plane beside MPI's control plane, for PyTorch and for TensorFlow."""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from hpctrain.common.cluster.gpus import sharing_variables
from hpctrain.common.cluster.mpi import BUILD_HINT
from hpctrain.common.errors import HpctrainError, TransientError
from hpctrain.common.settings import SHARE_GPUS, TIMEOUT
from hpctrain.worker.comm import forks
from hpctrain.worker.comm.engines import PendingWork, TorchEngine, Work, reduce_copy
from hpctrain.worker.comm.mpi import MpiControl
from hpctrain.worker.comm.rank_run import run
from hpctrain.worker.comm.timeout import Timeout

if TYPE_CHECKING:
    import tensorflow as tf
    import torch
    from mpi4py import MPI


_WAITED_IN = "Horovod's reduction"


class HorovodCommunicator(MpiControl):
    """Ranks started by MPI whose gradients Horovod reduces."""

    backend = "horovod"

    def __init__(self, world: MPI.Intracomm, reason: str) -> None:
        super().__init__(world, reason)
        self._modules: dict[str, Any] = {}

    def torch(self) -> HorovodTorchEngine:
        return HorovodTorchEngine(self._load("torch"), self.timeout)

    def tensorflow(self) -> HorovodTensorFlowEngine:
        if SHARE_GPUS.read():
            raise HpctrainError(
                "HT-gpus-not-shareable",
                "--share-gpus is for PyTorch, and this is Keras",
                "leave --share-gpus out, or choose --backend mpi",
            )
        return HorovodTensorFlowEngine(self._load("tensorflow"), self.timeout)

    def shutdown(self) -> None:
        # Horovod ends on all ranks as soon as one asks for it, so a rank must not ask while others still reduce.
        if self._modules:
            self.barrier()
        for module in self._modules.values():
            module.shutdown()
        self._modules.clear()
        super().shutdown()

    def _load(self, framework: str) -> Any:
        """Import and start Horovod for one framework, and make sure that it sees the same ranks as MPI."""
        if framework not in self._modules:
            module = _import_horovod(framework)
            # Horovod's own guard against a rank that never submits its tensor only warns without a limit. The limit
            # is in whole seconds, and has to exceed the time of the first warning.
            limit = max(2, round(TIMEOUT.read()))
            os.environ.setdefault("HOROVOD_STALL_CHECK_TIME_SECONDS", str(min(60, limit // 2)))
            os.environ.setdefault("HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", str(limit))
            if SHARE_GPUS.read():
                for name, value in sharing_variables(self.rank, self.host).items():
                    os.environ.setdefault(name, value)
            if framework == "torch":
                # Fusion joins the buckets that are ready at a time, which differ from run to run, and with them the
                # order in which more than two ranks' numbers are added. Buckets are large enough by themselves.
                os.environ.setdefault("HOROVOD_FUSION_THRESHOLD", "0")
            module.init()
            # Horovod's own exit handler would run first, and end the reductions of other ranks with an obscure error.
            run.leave_first()
            if (module.rank(), module.size()) != (self.rank, self.size):
                raise HpctrainError(
                    "HT-mpi-other-than-launcher",
                    "Horovod sees rank {rank} of {size}, MPI sees rank {mpi_rank} of {mpi_size}: Horovod "
                    "was built for a different MPI from the one that started this run",
                    BUILD_HINT,
                    rank=module.rank(),
                    size=module.size(),
                    mpi_rank=self.rank,
                    mpi_size=self.size,
                )
            self._modules[framework] = module
            # NCCL may send over other adapters than MPI.
            self.measures_links = not module.nccl_built()
        return self._modules[framework]


def _import_horovod(framework: str) -> Any:
    # Horovod's extension registers with TensorFlow as it loads, and TensorFlow logs a page at that moment.
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    try:
        module = importlib.import_module(f"horovod.{framework}")
        # A build without this framework can be imported, but fails here, with a clearer error than at first use.
        module.mpi_built()
    except ImportError as error:
        raise HpctrainError(
            "HT-backend-unavailable",
            "Horovod for {framework} cannot be loaded: {reason}",
            BUILD_HINT,
            framework=framework,
            reason=str(error),
        ) from error
    if not module.mpi_built():
        raise HpctrainError("HT-backend-unavailable", "this Horovod was built without MPI", BUILD_HINT)
    return module


class HorovodTorchEngine(TorchEngine):
    """Reduces flat PyTorch buffers with Horovod's asynchronous collectives."""

    def __init__(self, horovod: Any, timeout: Timeout) -> None:
        self._horovod = horovod
        self._synchronize = functools.partial(_synchronize, horovod, timeout)

    def allreduce(self, buffer: torch.Tensor, name: str, wire: torch.dtype | None = None) -> Work:
        import torch

        # A thread of the rank may have held the lock of Horovod's queue at the fork.
        forks.require_rank("a reduction")
        if buffer.dtype == torch.bfloat16:
            wire = torch.float32  # Horovod 0.28.1 does not reduce bfloat16
        if wire:
            return reduce_copy(buffer, wire, lambda copy: self.allreduce(copy, name))
        if buffer.is_cuda and not self._horovod.nccl_built():
            raise HpctrainError(
                "HT-backend-unavailable",
                "this Horovod was built without NCCL and cannot reduce gradients on GPUs",
                BUILD_HINT,
            )
        handle = self._horovod.allreduce_async_(buffer, name=name, op=self._horovod.Average)
        return PendingWork(lambda: self._synchronize(handle))

    def allgather(self, tensor: torch.Tensor, name: str) -> torch.Tensor:
        import torch

        forks.require_rank("a reduction")
        # float32 represents every bfloat16 exactly.
        wire = torch.float32 if tensor.dtype == torch.bfloat16 else tensor.dtype
        handle = self._horovod.allgather_async(tensor.to(wire).contiguous(), name=name)
        joined: torch.Tensor = self._synchronize(handle)
        return joined.to(tensor.dtype)

    def broadcast(self, tensor: torch.Tensor, name: str, root: int = 0) -> None:
        forks.require_rank("a reduction")
        handle = self._horovod.broadcast_async_(tensor, root_rank=root, name=name)
        self._synchronize(handle)


class HorovodTensorFlowEngine:
    """Reduces TensorFlow tensors with Horovod's low-level operations, the only ones sound on Keras 3."""

    def __init__(self, horovod: Any, timeout: Timeout) -> None:
        self._horovod = horovod
        self._timeout = timeout
        self._wait = contextlib.ExitStack()

    def allreduce(self, tensors: Sequence[tf.Tensor], name: str, wire: tf.DType | None = None) -> list[tf.Tensor]:
        import tensorflow as tf

        sent = [_tensorflow_wire(tf.cast(each, wire) if _narrows(wire, each) else each) for each in tensors]
        # The rank counts as waiting from the time that it has all tensors until it has all means.
        with tf.control_dependencies(sent), tf.control_dependencies([_call(self._begin_wait)]):
            means = self._means(sent, name)
        with tf.control_dependencies(means), tf.control_dependencies([_call(self._wait.close)]):
            # tf.cast to the same type adds no operation that could wait.
            passed = [tf.identity(mean) for mean in means]
        return [tf.cast(mean, tensor.dtype) for mean, tensor in zip(passed, tensors, strict=True)]

    def _begin_wait(self) -> None:
        self._wait.close()  # of a reduction that failed
        self._wait.enter_context(self._timeout.blocking(_WAITED_IN))

    def _means(self, tensors: list[tf.Tensor], name: str) -> list[tf.Tensor]:
        """The means of all tensors, by one grouped reduction for each type."""
        means = list(tensors)
        for dtype in sorted({tensor.dtype.name for tensor in tensors}):
            indices = [index for index, tensor in enumerate(tensors) if tensor.dtype.name == dtype]
            group = self._horovod.grouped_allreduce(
                [tensors[index] for index in indices],
                op=self._horovod.Average,
                name=f"{name}.{dtype}",
                ignore_name_scope=True,
            )
            for index, mean in zip(indices, group, strict=True):
                means[index] = mean
        return means

    def allgather(self, tensor: tf.Tensor, name: str) -> tf.Tensor:
        import tensorflow as tf

        joined = self._horovod.allgather(_tensorflow_wire(tensor), name=name, ignore_name_scope=True)
        return tf.cast(joined, tensor.dtype)

    def broadcast(self, variables: Sequence[tf.Variable], name: str) -> None:
        import tensorflow as tf

        for index, variable in enumerate(variables):
            # Sent as bytes, because Horovod does not know every dtype.
            as_bytes = variable.dtype != tf.bool
            value = tf.bitcast(variable, tf.uint8) if as_bytes else tf.convert_to_tensor(variable)
            value = self._horovod.broadcast(value, root_rank=0, name=f"{name}.{index}", ignore_name_scope=True)
            variable.assign(tf.bitcast(value, variable.dtype) if as_bytes else value)


def _call(function: Callable[[], None]) -> tf.Tensor:
    """A TensorFlow operation that calls a function."""
    import tensorflow as tf

    def call() -> bool:
        function()
        return True

    return tf.py_function(call, [], tf.bool)


def _narrows(wire: tf.DType | None, tensor: tf.Tensor) -> bool:
    """Whether to narrow a tensor: integers would lose digits, and a float gains nothing from a wider type."""
    return wire is not None and tensor.dtype.is_floating and wire.size < tensor.dtype.size


def _tensorflow_wire(tensor: tf.Tensor) -> tf.Tensor:
    """The tensor in a type that Horovod 0.28.1 knows: float32, which is exact, in place of bfloat16."""
    import tensorflow as tf

    return tf.cast(tensor, tf.float32) if tensor.dtype == tf.bfloat16 else tensor


def _synchronize(horovod: Any, timeout: Timeout, handle: int) -> Any:
    """The result of a reduction, with a limit: Horovod's own does not work in a process that is stopped."""
    try:
        with timeout.blocking(_WAITED_IN):
            return horovod.synchronize(handle)
    except RuntimeError as error:
        raise TransientError(
            "HT-collective-failed",
            "Horovod's reduction failed: {reason}",
            "another rank failed or stopped earlier: its own log in logs/ says why",
            exit_code=1,
            reason=str(error),
        ) from error
