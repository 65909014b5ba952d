"""Horovod's data plane beside MPI's control plane, for PyTorch and for TensorFlow."""

from __future__ import annotations

import importlib
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from hpctrain.comm.base import Work
from hpctrain.comm.mpi import MpiControl, timeout_seconds
from hpctrain.errors import HpctrainError

if TYPE_CHECKING:
    import tensorflow as tf
    import torch
    from mpi4py import MPI

BUILD_HINT = "run: hpctrain horovod build"


class HorovodCommunicator(MpiControl):
    """Ranks started by MPI whose gradients Horovod reduces."""

    backend = "horovod"

    def __init__(self, world: MPI.Intracomm, reason: str) -> None:
        super().__init__(world, reason)
        self._modules: dict[str, Any] = {}

    def torch(self) -> HorovodTorchEngine:
        return HorovodTorchEngine(self._load("torch"))

    def tensorflow(self) -> HorovodTensorFlowEngine:
        return HorovodTensorFlowEngine(self._load("tensorflow"))

    def shutdown(self) -> None:
        for module in self._modules.values():
            module.shutdown()
        self._modules.clear()
        super().shutdown()

    def _load(self, framework: str) -> Any:
        """Import and start Horovod for one framework, and make sure that it sees the same ranks as MPI."""
        if framework not in self._modules:
            module = _import_horovod(framework)
            # Horovod's own guard against a rank that never submits its tensor: without a limit it only warns.
            os.environ.setdefault("HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", f"{timeout_seconds():.0f}")
            module.init()
            if (module.rank(), module.size()) != (self.rank, self.size):
                raise HpctrainError(
                    f"Horovod sees rank {module.rank()} of {module.size()}, MPI sees rank {self.rank} of "
                    f"{self.size}: Horovod was built for another MPI than the one that started this run",
                    BUILD_HINT,
                )
            self._modules[framework] = module
        return self._modules[framework]


def _import_horovod(framework: str) -> Any:
    # Horovod's extension registers with TensorFlow as it loads, and TensorFlow logs a page at that moment.
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    try:
        module = importlib.import_module(f"horovod.{framework}")
        # importing succeeds with a build that lacks this framework; the first use fails with less to go by
        module.mpi_built()
    except ImportError as error:
        raise HpctrainError(f"Horovod for {framework} cannot be loaded: {error}", BUILD_HINT) from error
    if not module.mpi_built():
        raise HpctrainError("this Horovod was built without MPI", BUILD_HINT)
    return module


class _TorchWork:
    def __init__(self, horovod: Any, handle: int) -> None:
        self._horovod = horovod
        self._handle = handle

    def wait(self) -> None:
        try:
            self._horovod.synchronize(self._handle)
        except RuntimeError as error:
            raise _failed(error) from error


class HorovodTorchEngine:
    """Reduces flat PyTorch buffers with Horovod's asynchronous all-reduce."""

    def __init__(self, horovod: Any) -> None:
        self._horovod = horovod

    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        import torch

        return torch.zeros(numel, dtype=dtype, device=device)

    def wire_dtype(self, dtype: torch.dtype) -> torch.dtype:
        import torch

        # Horovod 0.28.1 knows no bfloat16; float32 holds every bfloat16 exactly.
        return torch.float32 if dtype == torch.bfloat16 else dtype

    def allreduce(self, buffer: torch.Tensor, name: str) -> Work:
        handle = self._horovod.allreduce_async_(buffer, name=name, op=self._horovod.Average)
        return _TorchWork(self._horovod, handle)

    def allgather(self, tensor: torch.Tensor, name: str) -> torch.Tensor:
        wire = self.wire_dtype(tensor.dtype)
        joined: torch.Tensor = self._horovod.allgather(tensor.to(wire).contiguous(), name=name)
        return joined.to(tensor.dtype)

    def broadcast(self, tensor: torch.Tensor, name: str) -> None:
        import torch

        # Bytes travel the same for every dtype, those that Horovod does not know included.
        flat = tensor.detach().contiguous().view(-1).view(torch.uint8)
        self._horovod.broadcast_(flat, root_rank=0, name=name)
        with torch.no_grad():
            tensor.copy_(flat.view(tensor.dtype).view(tensor.shape))


class HorovodTensorFlowEngine:
    """Reduces TensorFlow tensors with Horovod's low-level operations, the only ones sound on Keras 3."""

    def __init__(self, horovod: Any) -> None:
        self._horovod = horovod

    def allreduce(self, tensors: Sequence[tf.Tensor], name: str) -> list[tf.Tensor]:
        by_dtype: dict[Any, list[int]] = {}
        for index, tensor in enumerate(tensors):
            by_dtype.setdefault(tensor.dtype, []).append(index)
        reduced: list[Any] = [None] * len(tensors)
        for dtype, indices in by_dtype.items():
            group = self._horovod.grouped_allreduce(
                [tensors[index] for index in indices],
                op=self._horovod.Average,
                name=f"{name}.{dtype.name}",
                ignore_name_scope=True,
            )
            for index, tensor in zip(indices, group, strict=True):
                reduced[index] = tensor
        return reduced

    def allgather(self, tensor: tf.Tensor, name: str) -> tf.Tensor:
        return self._horovod.allgather(tensor, name=name, ignore_name_scope=True)

    def minimum(self, tensor: tf.Tensor, name: str) -> tf.Tensor:
        return self._horovod.allreduce(tensor, op=self._horovod.Min, name=name, ignore_name_scope=True)

    def broadcast(self, variables: Sequence[tf.Variable], name: str) -> None:
        for index, variable in enumerate(variables):
            value = self._horovod.broadcast(
                variable.value(), root_rank=0, name=f"{name}.{index}", ignore_name_scope=True
            )
            variable.assign(value)


def _failed(error: Exception) -> HpctrainError:
    return HpctrainError(
        f"Horovod's reduction failed: {error}",
        "another rank failed or stopped earlier: its own log in logs/ says why",
        exit_code=1,
    )
