"""What reduces the gradients: the interface of the engines, and reductions of copies, in a narrower type or in memory
that suits an engine.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Literal, Protocol, TypeVar, get_args

from hpctrain.common.errors import HpctrainError, nearest

if TYPE_CHECKING:
    import tensorflow as tf
    import torch

T = TypeVar("T")
Compression = Literal["none", "fp16", "bf16"]


class Work(Protocol):
    """A reduction in progress."""

    def wait(self) -> None:
        """Block until the buffer holds the result; raises HpctrainError if a rank failed."""


class TorchEngine(Protocol):
    """Reduces flat PyTorch buffers. Every rank submits the same buffers under the same names.

    Attributes:
        in_place: whether a buffer from elsewhere is reduced as fast as one of :meth:`allocate`.
    """

    in_place: bool = True

    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """A zeroed flat tensor in memory that suits this engine."""
        import torch

        return torch.zeros(numel, dtype=dtype, device=device)

    def allreduce(self, buffer: torch.Tensor, name: str, wire: torch.dtype | None = None) -> Work:
        """Start replacing ``buffer`` (float16, bfloat16, float32 or float64) by its mean over all ranks, in place.

        ``wire`` is a narrower type in which values travel over a network. Sums within a node's memory keep the
        buffer's own type.
        """

    def allgather(self, tensor: torch.Tensor, name: str) -> torch.Tensor:
        """All ranks' tensors joined along dimension 0, whose length may differ between ranks."""

    def broadcast(self, tensor: torch.Tensor, name: str, root: int = 0) -> None:
        """Overwrite ``tensor`` by that of rank ``root``, in place."""


class TensorFlowEngine(Protocol):
    """Reduces TensorFlow tensors, in graph mode and eagerly."""

    def allreduce(self, tensors: Sequence[tf.Tensor], name: str, wire: tf.DType | None = None) -> list[tf.Tensor]:
        """The mean of each tensor over all ranks; one call per step, each dtype in a fused reduction.

        For ``wire`` see :meth:`TorchEngine.allreduce`.
        """

    def allgather(self, tensor: tf.Tensor, name: str) -> tf.Tensor:
        """All ranks' tensors joined along dimension 0, whose length may differ between ranks."""

    def broadcast(self, variables: Sequence[tf.Variable], name: str) -> None:
        """Overwrite each variable by rank 0's."""


class PendingWork(Work):
    """A reduction in progress, for which a function waits; it is called once, and dropped with what it refers to."""

    def __init__(self, wait: Callable[[], object]) -> None:
        self._wait: Callable[[], object] | None = wait

    def wait(self) -> None:
        if self._wait:
            self._wait()
        self._wait = None


def reduce_copy(buffer: torch.Tensor, wire: torch.dtype, reduce: Callable[[torch.Tensor], Work]) -> CopiedWork:
    """``reduce`` a copy of ``buffer`` in the type ``wire``; waiting for it writes the result to ``buffer``."""
    copied = buffer.to(wire, copy=True)
    return CopiedWork(reduce(copied), copied, buffer)


class CopiedWork(Work):
    """The reduction of a copy; waiting for it writes the result to the original."""

    def __init__(self, work: Work, reduced: torch.Tensor, buffer: torch.Tensor) -> None:
        self._work = work
        self._reduced = reduced
        self._buffer = buffer

    def wait(self) -> None:
        self._work.wait()
        self._buffer.copy_(self._reduced)


def wire_of(compression: str, types: Mapping[str, T]) -> T | None:
    """The type in which values travel, of the framework's ``types`` by the compression's name; None for their own."""
    if compression not in get_args(Compression):
        raise HpctrainError(
            "HT-choice-unknown",
            "unknown compression {compression!r}",
            nearest(compression, get_args(Compression)),
            compression=compression,
        )
    return types.get(compression)
