"""Products with matrices and the functions that networks consist of, on the rows that are here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional as F

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


@rule(*named("linear embedding", F))
def with_weights(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A function of each row with weights that all rows share."""
    x, *weights = args
    others = [*weights, *kwargs.values()]
    if not isinstance(x, BatchTensor) or any(isinstance(each, BatchTensor) for each in others):
        return NotImplemented
    if func is F.linear and x.rows.dim == x.dim() - 1:
        return NotImplemented
    # Rescaling the weights, or gradients by how often a row occurs, concerns the whole batch.
    if any(kwargs.get(name) for name in ("max_norm", "scale_grad_by_freq", "sparse")):
        return NotImplemented

    def shared(value: Any) -> Any:
        return for_rows(value, x.rows) if isinstance(value, torch.Tensor) else value

    return BatchTensor(func(x.local, *map(shared, weights), **{k: shared(v) for k, v in kwargs.items()}), x.rows)
