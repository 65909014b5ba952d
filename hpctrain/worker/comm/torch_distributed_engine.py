"""The engines over torch.distributed: PyTorch's gradients travel by Gloo or NCCL."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from hpctrain.common.errors import HpctrainError
from hpctrain.worker.comm.engines import PendingWork, TorchEngine, Work, reduce_copy

if TYPE_CHECKING:
    from hpctrain.worker.comm.torch_distributed import TorchDistributedCommunicator


class TorchDistributedEngine(TorchEngine):
    """Reduces flat PyTorch buffers: on GPUs with NCCL, in the CPU's memory with Gloo."""

    def __init__(self, comm: TorchDistributedCommunicator, members: Any) -> None:
        self._comm = comm
        self._members = members

    def close(self) -> None:
        """Drop the group: its sockets stay open as long as any reference to it exists."""
        self._members = None

    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        if device.type == "cuda" and not self._comm.on_gpus:
            raise HpctrainError(
                "HT-backend-unfit",
                "backend 'gloo' reduces in the CPU's memory, not on GPUs",
                "choose --backend nccl",
            )
        return super().allocate(numel, dtype, device)

    def allreduce(self, buffer: torch.Tensor, name: str, wire: torch.dtype | None = None) -> Work:
        if buffer.itemsize == 2 and not buffer.is_cuda:
            # Gloo would round 16-bit sums at every hop.
            wire = torch.float32
        if wire and wire != buffer.dtype:
            return reduce_copy(buffer, wire, lambda copy: self.allreduce(copy, name))
        handle = self._comm.start(dist.all_reduce, buffer, dist.ReduceOp.AVG, self._members)
        # Once waited for it is dropped: it would keep Gloo's sockets open, even after the end of the group.
        return PendingWork(lambda: self._comm.finish(handle, name, on_gpu=buffer.is_cuda))

    def allgather(self, tensor: torch.Tensor, name: str) -> torch.Tensor:
        # Sent as bytes, because Gloo does not know every type.
        parts = self._comm.gather(tensor.detach().reshape(-1).view(torch.uint8), name, self._members)
        joined = torch.cat([part.view(tensor.dtype) for part in parts])
        return joined.view(-1, *tensor.shape[1:])

    def broadcast(self, tensor: torch.Tensor, name: str, root: int = 0) -> None:
        flat = tensor.detach().reshape(-1)
        self._comm.run(dist.broadcast, flat.view(torch.uint8), root, self._members, what=name)
        if flat.data_ptr() != tensor.data_ptr():
            tensor.copy_(flat.view(tensor.shape))
