"""What every communicator offers, whatever carries its messages.

The control plane (rank, size, objects, small arrays, barrier) is the same for all. The data plane, which
reduces the gradients, is an engine of its own for each framework, reached through :meth:`Communicator.torch`
and :meth:`Communicator.tensorflow`.
"""

from __future__ import annotations

import socket
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import tensorflow as tf
    import torch

T = TypeVar("T")
Reduction = Literal["mean", "sum", "min", "max"]
FloatArray = NDArray[np.float64]
AnyArray = NDArray[Any]


class Work(Protocol):
    """A reduction in flight."""

    def wait(self) -> None:
        """Block until the buffer holds the result; raises HpctrainError if a rank failed."""


class TorchEngine(Protocol):
    """Reduces flat PyTorch buffers. Every rank submits the same buffers under the same names.

    Attributes:
        in_place: a buffer that the engine did not allocate is reduced as fast as one that it did.
    """

    in_place: bool

    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """A zeroed flat tensor where this engine likes its input to lie."""

    def allreduce(self, buffer: torch.Tensor, name: str) -> Work:
        """Start replacing ``buffer`` (float16, bfloat16, float32 or float64) by its mean over all ranks, in place."""

    def allgather(self, tensor: torch.Tensor, name: str) -> torch.Tensor:
        """All ranks' tensors joined along dimension 0, whose length may differ between ranks."""

    def broadcast(self, tensor: torch.Tensor, name: str) -> None:
        """Overwrite ``tensor`` by rank 0's, in place."""


class TensorFlowEngine(Protocol):
    """Reduces TensorFlow tensors, in graph mode and eagerly."""

    def allreduce(self, tensors: Sequence[tf.Tensor], name: str) -> list[tf.Tensor]:
        """The mean of each tensor over all ranks; one call a step, every dtype its own fused reduction."""

    def allgather(self, tensor: tf.Tensor, name: str) -> tf.Tensor:
        """All ranks' tensors joined along dimension 0, whose length may differ between ranks."""

    def minimum(self, tensor: tf.Tensor, name: str) -> tf.Tensor:
        """The element-wise minimum over all ranks."""

    def broadcast(self, variables: Sequence[tf.Variable], name: str) -> None:
        """Overwrite each variable by rank 0's."""


class Communicator(ABC):
    """The ranks of one run, and this process's place among them.

    Attributes:
        rank, size: this process's number and how many there are.
        local_rank, local_size: the same among the processes of this host.
        host: the name of this host.
        backend: what reduces the gradients: ``single`` or ``horovod``.
        reason: one sentence on why this backend was chosen.
        batch_weight: what the mean loss over this rank's samples of the current batch is to be multiplied by, so that
            the mean over the ranks is the mean over the global batch (see hpctrain.data.sampling.Share). The sharded
            loader sets it, the adapter applies it to the gradients.
        batch_weighed: whether gradients were multiplied by it since it was set.
    """

    backend: str
    rank: int
    size: int
    local_rank: int
    local_size: int

    def __init__(self, reason: str) -> None:
        self.reason = reason
        self.batch_weight = 1.0
        self.batch_weighed = True
        self.host = socket.gethostname()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} rank {self.rank} of {self.size} on {self.host}>"

    # The control plane. Every method is collective: all ranks call it, in the same order.

    @abstractmethod
    def barrier(self) -> None:
        """Wait until every rank has come here."""

    @abstractmethod
    def broadcast_object(self, value: T) -> T:
        """Rank 0's ``value``, on every rank."""

    @abstractmethod
    def allgather_object(self, value: T) -> list[T]:
        """The values of all ranks, in the order of the ranks, on every rank."""

    @abstractmethod
    def allreduce(self, array: AnyArray, reduction: Reduction = "mean") -> AnyArray:
        """A small array reduced element by element over all ranks, the same bits on each."""

    # The data plane.

    @abstractmethod
    def torch(self) -> TorchEngine:
        """The engine that reduces PyTorch gradients."""

    @abstractmethod
    def tensorflow(self) -> TensorFlowEngine:
        """The engine that reduces TensorFlow gradients."""

    @abstractmethod
    def abort(self, exit_code: int) -> None:
        """End every rank of the run at once. Does not return where there is more than one rank."""

    @abstractmethod
    def shutdown(self) -> None:
        """Release threads and communicators; the object is of no use afterwards. Idempotent."""
