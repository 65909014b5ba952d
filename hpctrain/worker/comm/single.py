"""The communicator of a single process: every collective returns its argument."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, TypeVar

from hpctrain.common.settings import TIMEOUT
from hpctrain.worker.comm.base import SUMMING, AnyArray, Communicator, Group, Reduction
from hpctrain.worker.comm.engines import PendingWork, TorchEngine, Work

if TYPE_CHECKING:
    import tensorflow as tf
    import torch

T = TypeVar("T")


class SingleCommunicator(Communicator):
    """One rank, without messages."""

    backend = "single"
    rank = 0
    size = 1
    local_rank = 0
    local_size = 1
    _made_group = False

    def barrier(self) -> None: ...

    def broadcast_object(self, value: T) -> T:
        return value

    def allgather_object(self, value: T) -> list[T]:
        return [value]

    def allreduce(self, array: AnyArray, reduction: Reduction = "mean") -> AnyArray:
        return array.copy()

    def group(self, size: int | None = None, what: str = SUMMING) -> Group:
        return _Alone(self.rank, self.size)

    def torch(self) -> TorchEngine:
        return SingleTorchEngine()

    def tensorflow(self) -> SingleTensorFlowEngine:
        return SingleTensorFlowEngine()

    def _process_group(self) -> None:
        import torch
        import torch.distributed as dist

        from hpctrain.worker.comm.process_group.backend import require_ranks
        from hpctrain.worker.comm.rendezvous import listening_at, make_default_group

        if dist.is_initialized():
            require_ranks(self.rank, self.size)
            return
        with listening_at("127.0.0.1"):
            on_gpu = torch.cuda.is_available() and dist.is_nccl_available()
            backend = "cpu:gloo,cuda:nccl" if on_gpu else "gloo"
            make_default_group(backend, dist.HashStore(), 0, 1, timedelta(seconds=TIMEOUT.read()))  # type: ignore[attr-defined]
        self._made_group = True

    def shutdown(self) -> None:
        if self._made_group:
            import torch.distributed as dist

            self._made_group = False
            # The script may have destroyed it.
            if dist.is_initialized():
                dist.destroy_process_group()


class _Alone(Group):
    def allreduce(self, array: AnyArray) -> AnyArray:
        return array.copy()


class SingleTorchEngine(TorchEngine):
    """The mean over one rank is the rank's own gradient."""

    def allreduce(self, buffer: torch.Tensor, name: str, wire: torch.dtype | None = None) -> Work:
        return PendingWork(lambda: None)

    def allgather(self, tensor: torch.Tensor, name: str) -> torch.Tensor:
        return tensor

    def broadcast(self, tensor: torch.Tensor, name: str, root: int = 0) -> None: ...


class SingleTensorFlowEngine:
    """The mean over one rank is the rank's own gradient."""

    def allreduce(self, tensors: Sequence[tf.Tensor], name: str, wire: tf.DType | None = None) -> list[tf.Tensor]:
        return list(tensors)

    def allgather(self, tensor: tf.Tensor, name: str) -> tf.Tensor:
        return tensor

    def broadcast(self, variables: Sequence[tf.Variable], name: str) -> None: ...
