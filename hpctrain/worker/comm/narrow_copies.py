"""Reduces gradients as copies in a narrower type, for engines that reduce the type they are given."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from hpctrain.worker.comm.base import Work

if TYPE_CHECKING:
    import torch


class Narrowing:
    """Reduces copies of buffers in a narrower type; the copies are kept by name."""

    def __init__(self) -> None:
        self._buffers: dict[str, torch.Tensor] = {}

    def allreduce(
        self, buffer: torch.Tensor, name: str, wire: torch.dtype, reduce: Callable[[torch.Tensor], Work]
    ) -> Work:
        """``reduce`` a copy of ``buffer`` in the type ``wire``; waiting for it writes the result to ``buffer``."""
        narrow = self._buffers.get(name)
        if narrow is None or narrow.shape != buffer.shape or narrow.dtype != wire:
            narrow = self._buffers[name] = buffer.to(wire, copy=True)
        else:
            narrow.copy_(buffer)
        return CopiedWork(reduce(narrow), narrow, buffer)


class CopiedWork:
    """The reduction of a copy; waiting for it writes the result to the original."""

    def __init__(self, work: Work, reduced: torch.Tensor, buffer: torch.Tensor) -> None:
        self._work = work
        self._reduced = reduced
        self._buffer = buffer

    @property
    def finite(self) -> bool | None:
        return self._work.finite

    def wait(self) -> None:
        self._work.wait()
        self._buffer.copy_(self._reduced)
