"""Sums and means, over rows by one small message, and what treats each row by itself along other dimensions."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import torch
from torch.nn import functional as F
from torch.utils._pytree import tree_map

from hpctrain.worker.adapters.torch.batch.elementwise import elementwise, for_rows
from hpctrain.worker.adapters.torch.batch.ranks import sum_over_ranks
from hpctrain.worker.adapters.torch.batch.tensor import BatchTensor, named, place_of, rule

T = torch.Tensor
_PAIRWISE = set(named("max min", torch, T))
_KEEPING = "softmax log_softmax softmin cumsum cumprod logcumsumexp sort argsort flip roll"
_REDUCING = """
amax amin argmax argmin max min nansum nanmean prod all any var std norm logsumexp median nanmedian mode topk
kthvalue var_mean std_mean cummax cummin
"""


def dims_of(args: tuple[Any, ...], kwargs: dict[str, Any], place: int = 1) -> tuple[int, ...] | None:
    """The dimensions that a function is applied along; None for all, or where they are not stated in this way."""
    given = kwargs.get("dim", kwargs.get("axis", args[place] if len(args) > place else None))
    dims = (given,) if type(given) is int else given
    if not isinstance(dims, tuple | list) or not dims or not all(type(each) is int for each in dims):
        return None
    return tuple(place_of(each, args[0].dim()) for each in dims)


@rule(*named("sum mean", torch, T))
def sum_or_mean(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    x = args[0]
    if kwargs.get("out") is not None or not isinstance(x, BatchTensor):
        return NotImplemented
    stated = len(args) > 1 or kwargs.get("dim", kwargs.get("axis")) is not None
    dims = dims_of(args, kwargs)
    keepdim = kwargs.get("keepdim", args[2] if len(args) > 2 else False)
    if (stated and dims is None) or (keepdim and dims is None) or len(args) > 3:
        return NotImplemented
    if dims is not None and x.rows.dim not in dims:
        return along_others(func, args, kwargs)
    dtype = kwargs.get("dtype")
    mean = func in (torch.mean, T.mean)
    if mean and not (dtype or x.dtype).is_floating_point and not (dtype or x.dtype).is_complex:
        return NotImplemented  # an error of PyTorch's own
    # Halves are added up in float32, as within one process.
    half = (dtype or x.dtype) in (torch.float16, torch.bfloat16)
    wide = torch.float32 if half else dtype
    own = x.local.sum(dtype=wide) if dims is None else x.local.sum(dims, keepdim=keepdim, dtype=wide)
    elements = prod(x.shape if dims is None else (x.shape[dim] for dim in dims))
    total = sum_over_ranks(own, x.rows.ranks, func.__name__, elements if mean else 1)
    return total.to(dtype or x.dtype) if half else total


# Where a function has its dimensions, if it has another argument before them.
_PLACES = dict.fromkeys(("norm", "topk", "kthvalue", "linalg_vector_norm", "roll"), 2)


@rule(
    *named(_REDUCING + _KEEPING, torch, T),
    *named("vector_norm", torch.linalg),
    *named("softmax log_softmax softmin glu normalize", F),
    *named("softmax log_softmax", torch.special),
)
def along_others(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A function of other dimensions than that of the rows, which it removes or keeps."""
    x, place = args[0], _PLACES.get(func.__name__, 1)
    if not isinstance(x, BatchTensor) or kwargs.get("out") is not None or len(args) > place + 2:
        return NotImplemented
    if any(isinstance(each, torch.Tensor) for each in (*args[1:], *kwargs.values())):
        return elementwise(func, args, kwargs) if func in _PAIRWISE else NotImplemented
    dims = dims_of(args, {"dim": kwargs["dims"]} if "dims" in kwargs else kwargs, place)
    if dims is None or x.rows.dim in dims or _has_empty(x) or (func is T.flip and len(args) > 2):
        return NotImplemented
    return _wrapped(func(x.local, *args[1:], **kwargs), x, dims)


def _has_empty(x: BatchTensor) -> bool:
    """Whether a rank has no element. PyTorch computes no gradient there, or another one than elsewhere."""
    return not x.numel() or 0 in x.rows.sizes


def _wrapped(result: Any, x: BatchTensor, dims: tuple[int, ...]) -> Any:
    """The batches of which tensors are the parts, from which the dimensions ``dims`` were removed or kept."""
    removed = sum(dim < x.rows.dim for dim in set(dims))

    def wrap(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        return BatchTensor(value, x.rows if value.dim() == x.dim() else x.rows.along(x.rows.dim - removed))

    return tree_map(wrap, result)


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
