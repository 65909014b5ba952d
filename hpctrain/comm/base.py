"""What every communicator offers, whatever carries its messages.

The control plane (rank, size, objects, small arrays, barrier) is the same for all. The data plane, which
reduces the gradients, is an engine of its own for each framework, reached through :meth:`Communicator.torch`
and :meth:`Communicator.tensorflow`.
"""

from __future__ import annotations

import socket
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from hpctrain.errors import HpctrainError
from hpctrain.stopping import RESUMABLE

if TYPE_CHECKING:
    import tensorflow as tf
    import torch

T = TypeVar("T")
Reduction = Literal["mean", "sum", "min", "max"]
FloatArray = NDArray[np.float64]
AnyArray = NDArray[Any]


class RanksLostError(HpctrainError):
    """Ranks of the run died. The others can go on after :meth:`Communicator.recover`."""

    def __init__(self, message: str) -> None:
        super().__init__(message, "hpctrain run --resume goes on from the last checkpoint", exit_code=RESUMABLE)


@dataclass(frozen=True, kw_only=True)
class LostRank:
    """A rank that died: its number in the run before, its number at the start of the run, and its host."""

    rank: int
    first_rank: int
    host: str


class Work(Protocol):
    """A reduction in flight."""

    @property
    def finite(self) -> bool | None:
        """Behind :meth:`wait`: whether all of the result is finite, the same on every rank; None: nobody looked."""

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

    def allreduce(self, buffer: torch.Tensor, name: str, wire: torch.dtype | None = None) -> Work:
        """Start replacing ``buffer`` (float16, bfloat16, float32 or float64) by its mean over all ranks, in place.

        ``wire`` is a narrower type in which values travel where travelling is what takes the time; what is added up
        within a node's memory keeps its own.
        """

    def allgather(self, tensor: torch.Tensor, name: str) -> torch.Tensor:
        """All ranks' tensors joined along dimension 0, whose length may differ between ranks."""

    def broadcast(self, tensor: torch.Tensor, name: str) -> None:
        """Overwrite ``tensor`` by rank 0's, in place."""


class TensorFlowEngine(Protocol):
    """Reduces TensorFlow tensors, in graph mode and eagerly."""

    def allreduce(self, tensors: Sequence[tf.Tensor], name: str, wire: tf.DType | None = None) -> list[tf.Tensor]:
        """The mean of each tensor over all ranks; one call a step, every dtype its own fused reduction.

        ``wire`` as of :meth:`TorchEngine.allreduce`.
        """

    def allgather(self, tensor: tf.Tensor, name: str) -> tf.Tensor:
        """All ranks' tensors joined along dimension 0, whose length may differ between ranks."""

    def minimum(self, tensor: tf.Tensor, name: str) -> tf.Tensor:
        """The element-wise minimum over all ranks."""

    def broadcast(self, variables: Sequence[tf.Variable], name: str) -> None:
        """Overwrite each variable by rank 0's."""


class Group(ABC):
    """Neighbouring ranks that add something up among themselves, in the middle of a step.

    Its messages are never taken for those of the gradients' reduction, which may go on meanwhile. Every rank of the
    group calls it in the same order, from one thread at a time; a wait has the limit of every wait.
    """

    @abstractmethod
    def allreduce(self, array: AnyArray) -> AnyArray:
        """The sum of a small array over the ranks of this rank's group."""

    def allreduce_torch(self, tensor: torch.Tensor) -> torch.Tensor:
        """The same of a PyTorch tensor, on its device."""
        import torch

        return torch.from_numpy(self.allreduce(tensor.cpu().numpy())).to(tensor.device)


class Communicator(ABC):
    """The ranks of one run, and this process's place among them.

    Attributes:
        rank, size: this process's number and how many there are.
        local_rank, local_size: the same among the processes of this host.
        host: the name of this host.
        backend: what reduces the gradients, one of hpctrain.plan.BACKENDS but ``auto``.
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
        self._leaving: list[weakref.WeakMethod[Callable[[], None]]] = []

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

    def group(self, size: int | None = None) -> Group:
        """This rank's group of ``size`` neighbouring ranks, which divides the ranks. Collective over all ranks.

        Without ``size`` it is all ranks. It ends with :meth:`recover`.

        Raises:
            HpctrainError: ranks that do not make groups of this size.
        """
        if size is not None and self.size % size:
            raise HpctrainError(
                f"{self.size} ranks do not make groups of {size}",
                f"start a multiple of {size} ranks",
            )
        return self._group(size)

    @abstractmethod
    def _group(self, size: int | None) -> Group: ...

    # The data plane.

    @abstractmethod
    def torch(self) -> TorchEngine:
        """The engine that reduces PyTorch gradients."""

    @abstractmethod
    def tensorflow(self) -> TensorFlowEngine:
        """The engine that reduces TensorFlow gradients."""

    def before_shutdown(self, leave: Callable[[], None]) -> None:
        """Call a method, if its object still lives, before an engine's memory goes: nothing may lie there any more."""
        self._leaving.append(weakref.WeakMethod(leave))

    def _leave_memory(self) -> None:
        for reference in self._leaving:
            if leave := reference():
                leave()
        self._leaving.clear()

    def watch_numbers(self) -> None:  # noqa: B027  # most engines cannot
        """From now on let reductions tell whether their means are finite, where an engine can do that as it makes them.

        On all ranks, before the first reduction.
        """

    # Ranks that die.

    @property
    def heals(self) -> bool:
        """Whether the other ranks can go on when one dies: collectives then raise RanksLostError."""
        return False

    @property
    def lost(self) -> bool:
        """Whether ranks are known to have died since the run was formed, or formed anew."""
        return False

    def agree(self) -> None:
        """A barrier that every rank passes; where ranks die and :attr:`heals`, all that are left pass it, or none.

        Raises:
            RanksLostError: ranks died before all had come; every rank that is left gets it.
        """
        self.barrier()

    def broadcast_bytes(self, buffer: NDArray[np.uint8], root: int = 0) -> None:
        """Overwrite ``buffer`` by that of rank ``root``, in place. Of backends that heal."""
        raise NotImplementedError

    def recover(self) -> tuple[LostRank, ...]:
        """After RanksLostError, on every rank that is left: form the run anew without the dead.

        ``rank``, ``size`` and the local ones then are the new ones, in the same order as before; buffers of an engine
        are of no use any more.

        Returns:
            Who died, the same on every rank.

        Raises:
            HpctrainError: it cannot be done.
        """
        raise HpctrainError(f"backend {self.backend!r} cannot go on without a rank that died", exit_code=RESUMABLE)

    @abstractmethod
    def abort(self, exit_code: int) -> None:
        """End every rank of the run at once. Does not return where there is more than one rank."""

    @abstractmethod
    def shutdown(self) -> None:
        """Release threads and communicators; the object is of no use afterwards. Idempotent."""
