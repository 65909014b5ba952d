"""The MPI engine for PyTorch."""

from __future__ import annotations

import bisect
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
import torch

from hpctrain.comm.shared.reducer import Reducer, Task, Worker
from hpctrain.comm.shared.segments import Segment
from hpctrain.errors import HpctrainError

if TYPE_CHECKING:
    from hpctrain.comm.mpi import MpiControl

_NUMPY: dict[torch.dtype, np.dtype[Any]] = {
    torch.float64: np.dtype(np.float64),
    torch.float32: np.dtype(np.float32),
    torch.float16: np.dtype(np.float16),
    torch.bfloat16: np.dtype(ml_dtypes.bfloat16),
}


class _Work:
    def __init__(self, worker: Worker, task: Task, staged: tuple[torch.Tensor, torch.Tensor] | None) -> None:
        self._worker = worker
        self._task = task
        self._staged = staged

    def wait(self) -> None:
        self._worker.wait(self._task)
        if self._staged:
            buffer, staging = self._staged
            buffer.copy_(staging)


class MpiTorchEngine:
    """Reduces flat PyTorch buffers in the CPU's memory."""

    # Only what the engine allocated lies in shared memory.
    in_place = False

    def __init__(self, control: MpiControl, reducer: Reducer, worker: Worker) -> None:
        self._control = control
        self._reducer = reducer
        self._worker = worker
        self._addresses: list[int] = []
        self._segments: list[Segment] = []
        self._staging: dict[str, torch.Tensor] = {}

    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        if device.type != "cpu":
            raise HpctrainError(f"the MPI engine reduces in the CPU's memory, not on {device}", "--backend horovod")
        segment = self._reducer.allocate(numel * dtype.itemsize)
        where = bisect.bisect(self._addresses, segment.address)
        self._addresses.insert(where, segment.address)
        self._segments.insert(where, segment)
        return _tensor(segment, numel, dtype)

    def allreduce(self, buffer: torch.Tensor, name: str, wire: torch.dtype | None = None) -> _Work:
        shared, staged = buffer, None
        found = self._find(buffer)
        if found is None:
            shared = self._stage(buffer, name)
            staged = (buffer, shared)
            found = self._find(shared)
            assert found is not None
        segment, start = found
        task = Task(self._reducer, segment, start, buffer.nbytes, _NUMPY[buffer.dtype], name)
        self._worker.submit(task)
        return _Work(self._worker, task, staged)

    def allgather(self, tensor: torch.Tensor, name: str) -> torch.Tensor:
        flat = tensor.detach().contiguous().view(-1)
        parts = self._control.allgather_object(flat.view(torch.uint8).numpy())
        joined = torch.from_numpy(np.concatenate(parts)).view(flat.dtype)
        return joined.view(-1, *tensor.shape[1:])

    def broadcast(self, tensor: torch.Tensor, name: str) -> None:
        flat = tensor.detach().contiguous()
        self._control.broadcast_bytes(flat.view(-1).view(torch.uint8).numpy())
        if flat.data_ptr() != tensor.data_ptr():
            tensor.copy_(flat)

    def _find(self, buffer: torch.Tensor) -> tuple[Segment, int] | None:
        """The segment that a buffer lies in, and where."""
        address = buffer.data_ptr()
        index = bisect.bisect(self._addresses, address) - 1
        if index < 0:
            return None
        segment = self._segments[index]
        start = address - segment.address
        return (segment, start) if start + buffer.nbytes <= len(segment.own) else None

    def _stage(self, buffer: torch.Tensor, name: str) -> torch.Tensor:
        if name not in self._staging or self._staging[name].nbytes < buffer.nbytes:
            self._staging[name] = self.allocate(buffer.numel(), buffer.dtype, buffer.device)
        staging = self._staging[name][: buffer.numel()]
        staging.copy_(buffer)
        return staging


def _tensor(segment: Segment, numel: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.from_numpy(segment.own).view(dtype)[:numel]
