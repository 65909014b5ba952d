"""Products of matrices, of the rows that are here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from hpctrain.worker.adapters.torch.batch.collectives import sum_over_ranks
from hpctrain.worker.adapters.torch.batch.elementwise import for_rows
from hpctrain.worker.adapters.torch.batch.tensor import BatchTensor, named, rule

T = torch.Tensor


@rule(*named("matmul mm bmm", torch, T), T.__rmatmul__)
def matmul(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    func, operands = (T.matmul, args[::-1]) if func is T.__rmatmul__ else (func, args)
    if kwargs or len(args) != 2 or not all(isinstance(each, torch.Tensor) for each in args):
        return NotImplemented
    a, b = operands
    if isinstance(a, BatchTensor) and a.dim() >= 2 and a.rows.dim < a.dim() - 1:
        if b.dim() <= 2:
            return BatchTensor(func(a.local, _plain(b, a)), a.rows)
        if isinstance(b, BatchTensor) and a.dim() == b.dim() and a.rows == b.rows and a.rows.dim < a.dim() - 2:
            return BatchTensor(func(a.local, b.local), a.rows)
    elif isinstance(b, BatchTensor) and a.dim() == 2 == b.dim():
        if b.rows.dim == 1:
            return BatchTensor(func(_plain(a, b), b.local), b.rows)
        if isinstance(a, BatchTensor) and a.rows.sizes == b.rows.sizes:  # the product adds up over the rows
            return sum_over_ranks(func(a.local, b.local), b.rows.ranks, "a product")
    return NotImplemented


def _plain(value: torch.Tensor, beside: BatchTensor) -> torch.Tensor:
    """The other factor, of which each rank needs all."""
    return value.whole() if isinstance(value, BatchTensor) else for_rows(value, beside.rows)
