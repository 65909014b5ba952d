"""The MPI engine for PyTorch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
import torch

from hpctrain.common.errors import HpctrainError
from hpctrain.worker.comm.engines import CopiedWork, TorchEngine, Work
from hpctrain.worker.comm.shared.reducer import Reducer, ReductionTask

if TYPE_CHECKING:
    from hpctrain.worker.comm.mpi import MpiControl

_NUMPY: dict[torch.dtype | None, np.dtype[Any]] = {
    torch.float64: np.dtype(np.float64),
    torch.float32: np.dtype(np.float32),
    torch.float16: np.dtype(np.float16),
    torch.bfloat16: np.dtype(ml_dtypes.bfloat16),
}


class MpiTorchEngine(TorchEngine):
    """Reduces flat PyTorch buffers in the CPU's memory.

    Buffers that it allocates, and its copies of other tensors, stay in shared memory until the reducer is freed at
    shutdown: one per name and size. Tensors on a GPU are copied too.
    """

    # Other buffers have to be copied to shared memory.
    in_place = False

    def __init__(self, control: MpiControl, reducer: Reducer) -> None:
        self._control = control
        self._reducer = reducer
        self._submit = reducer.worker.submit
        # By name, with the tensor itself: reading its address, size and type takes as long as a small reduction.
        self._tasks: dict[str, tuple[torch.Tensor, torch.dtype | None, ReductionTask]] = reducer.table()
        self._staging: dict[Any, tuple[torch.Tensor, ReductionTask]] = reducer.table()

    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        _check(device)
        if device.type == "cuda":
            return super().allocate(numel, dtype, device)
        return torch.from_numpy(self._reducer.allocate(numel * dtype.itemsize).own).view(dtype)

    def allreduce(self, buffer: torch.Tensor, name: str, wire: torch.dtype | None = None) -> Work:
        known = self._tasks.get(name)
        if known is not None and known[0] is buffer and known[1] is wire:
            task = known[2]
            self._submit(task)
            return task
        return self._reduce_other(buffer, name, wire)

    def allgather(self, tensor: torch.Tensor, name: str) -> torch.Tensor:
        _check(tensor.device)
        flat = tensor.detach().cpu().contiguous().view(-1)
        parts = self._control.allgather_object(flat.view(torch.uint8).numpy())
        joined = torch.from_numpy(np.concatenate(parts)).view(flat.dtype)
        return joined.view(-1, *tensor.shape[1:]).to(tensor.device)

    def broadcast(self, tensor: torch.Tensor, name: str, root: int = 0) -> None:
        _check(tensor.device)
        flat = tensor.detach().cpu().contiguous()
        self._control.broadcast_bytes(flat.view(-1).view(torch.uint8).numpy(), root)
        if flat.data_ptr() != tensor.data_ptr():
            tensor.copy_(flat)

    def _reduce_other(self, buffer: torch.Tensor, name: str, wire: torch.dtype | None) -> Work:
        """Reduce a buffer other than the last one of this name."""
        found = None if buffer.is_cuda else self._reducer.find(buffer.data_ptr(), buffer.nbytes)
        if not found:
            return self._reduce_copy(buffer, name, wire)
        task = ReductionTask(self._reducer, *found, buffer.nbytes, _NUMPY[buffer.dtype], name, _NUMPY.get(wire))
        self._tasks[name] = (buffer, wire, task)
        self._submit(task)
        return task

    def _reduce_copy(self, buffer: torch.Tensor, name: str, wire: torch.dtype | None) -> Work:
        """Reduce a copy, kept by name and not by address, which another tensor may have later."""
        key = (name, buffer.numel(), buffer.dtype, wire)
        if key not in self._staging:
            own, task = self._reducer.stage(buffer.nbytes, _NUMPY[buffer.dtype], name, _NUMPY.get(wire))
            self._staging[key] = (torch.from_numpy(own).view(buffer.dtype), task)
        staging, task = self._staging[key]
        if not task.done:
            task.wait()
        staging.copy_(buffer)
        self._submit(task)
        return CopiedWork(task, staging, buffer)


def _check(device: torch.device) -> None:
    if device.type not in ("cpu", "cuda"):
        raise HpctrainError(
            "HT-backend-wrong-device",
            "the backend mpi reduces tensors in the CPU's memory or on a CUDA device, not on {device}",
            "move the model to one of them, or choose --backend gloo or nccl",
            exit_code=1,
            device=device,
        )
