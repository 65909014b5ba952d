"""Reduces copies of buffers: in a narrower type, or in memory that suits an engine."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Literal, TypeVar, get_args

from hpctrain.common.errors import HpctrainError, nearest
from hpctrain.worker.comm.base import Work

if TYPE_CHECKING:
    import torch


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
        self.finite = self._work.finite
        self._buffer.copy_(self._reduced)


T = TypeVar("T")
Compression = Literal["none", "fp16", "bf16"]


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
