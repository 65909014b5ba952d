"""Random tensors of a batch's shape: those of one process.

Each rank draws them whole from the stream that all ranks share, and keeps those of its rows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional as F

from hpctrain.worker.adapters.torch.batch.collectives import own_rows
from hpctrain.worker.adapters.torch.batch.tensor import BatchTensor, named, rule


@rule(*named("rand_like randn_like randint_like", torch))
def like(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    x = args[0]
    return BatchTensor(own_rows(func(_empty(x), *args[1:], **kwargs), x.rows), x.rows)


def _empty(x: BatchTensor) -> torch.Tensor:
    """A tensor like the whole batch. Random numbers are drawn in the order in which it lies in memory."""
    strides = x.local.stride()
    order = list(range(x.dim())) if 0 in strides else sorted(range(x.dim()), key=lambda dim: -strides[dim])
    laid_out = torch.empty([x.shape[dim] for dim in order], dtype=x.dtype, device=x.device)
    return laid_out.permute([order.index(dim) for dim in range(x.dim())])


@rule(F.dropout)
def dropout(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    x = args[0]
    if not kwargs["training"]:
        return x
    mask = F.dropout(torch.ones_like(_empty(x)), kwargs["p"])
    factors = BatchTensor(own_rows(mask, x.rows), x.rows)
    return x.mul_(factors) if kwargs["inplace"] else x * factors


@rule(*named("uniform_ normal_ bernoulli_ exponential_ cauchy_ log_normal_ geometric_ random_", torch.Tensor))
def in_place(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    x = args[0]
    if not isinstance(x, BatchTensor) or any(isinstance(each, torch.Tensor) for each in args[1:]):
        return NotImplemented
    whole = func(_empty(x), *args[1:], **kwargs)
    x.local.copy_(own_rows(whole, x.rows))
    return x
