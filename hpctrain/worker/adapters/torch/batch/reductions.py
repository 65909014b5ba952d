"""Sums, means and losses, over rows by one small message, and what treats each row by itself along other dimensions."""

from __future__ import annotations

import sys
from collections.abc import Callable
from math import prod
from typing import Any

import torch
from torch.nn import functional as F
from torch.utils._pytree import tree_map

from hpctrain.worker.adapters.torch.batch.elementwise import aligned, elementwise, for_rows, part_of
from hpctrain.worker.adapters.torch.batch.ranks import sum_over_ranks
from hpctrain.worker.adapters.torch.batch.tensor import BatchTensor, named, on_whole, place_of, rule

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


def autocast_widens_sums(x: torch.Tensor) -> bool:
    """Whether PyTorch's autocast returns the sum of 16-bit numbers in float32: on GPUs, and not on CPUs."""
    return x.is_cuda and torch.is_autocast_enabled("cuda") and x.dtype in (torch.float16, torch.bfloat16)


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
    if dtype is None and not mean and autocast_widens_sums(x):
        dtype = torch.float32
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


# The fewest dimensions with which a function takes the first one for samples.
_OF_SAMPLES = {
    2: "group_norm prelu",
    3: "interpolate local_response_norm",
    4: "conv2d conv_transpose2d max_pool2d max_pool2d_with_indices avg_pool2d adaptive_avg_pool2d adaptive_max_pool2d "
    "pixel_shuffle pixel_unshuffle channel_shuffle unfold",
}
_fewest = {func: dims for dims, names in _OF_SAMPLES.items() for func in named(names, F, torch)}


@rule(*_fewest, F.pad)
def of_samples(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A function of each sample, the first dimension."""
    x = args[0]
    fewest = len(args[1]) // 2 + 1 if func is F.pad else _fewest[func]
    if not isinstance(x, BatchTensor) or x.rows.dim or x.dim() < fewest or 0 in x.rows.sizes:
        return NotImplemented
    return _with_shared(func, x, args, kwargs)


@rule(F.linear)
def linear(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    x = args[0]
    if not isinstance(x, BatchTensor) or x.rows.dim == x.dim() - 1:
        return NotImplemented
    return _with_shared(func, x, args, kwargs)


def _with_shared(func: Callable[..., Any], x: BatchTensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What a function gives of the rows, all other operands being plain."""
    if any(isinstance(each, BatchTensor) for each in (*args[1:], *kwargs.values())):
        return NotImplemented

    def shared(value: Any) -> Any:
        return for_rows(value, x.rows) if isinstance(value, torch.Tensor) else value

    result = func(x.local, *map(shared, args[1:]), **{name: shared(value) for name, value in kwargs.items()})
    return tree_map(lambda each: BatchTensor(each, x.rows), result)


@rule(*named("gather scatter scatter_add take_along_dim", torch, T))
def along_dim(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Elements chosen along another dimension than that of the rows."""
    tensors = [each for each in args if isinstance(each, torch.Tensor)]
    dim = next((each for each in (kwargs.get("dim"), *args) if type(each) is int), None)
    operands = aligned(args, {}) if not kwargs.keys() - {"dim"} else None
    if dim is None or operands is None or 0 in operands.rows.sizes:
        return NotImplemented
    if any(each.dim() != operands.dims or each.shape[-operands.from_end] != operands.rows.total for each in tensors):
        return NotImplemented
    if place_of(dim, operands.dims) == operands.dims - operands.from_end:
        return NotImplemented
    return operands.result(func(*operands.args, **kwargs))


# PyTorch hands losses on with their operands by position and everything else by name.
_OF_ELEMENTS = """
mse_loss l1_loss smooth_l1_loss huber_loss binary_cross_entropy binary_cross_entropy_with_logits soft_margin_loss
poisson_nll_loss kl_div hinge_embedding_loss
"""
_HALVES = (torch.float16, torch.bfloat16)


def _reduction(given: dict[str, Any]) -> str | None:
    """How the losses are reduced; None where outdated arguments say it, or PyTorch does not know it."""
    reduction = given.get("reduction", "mean")
    if given.get("size_average") is not None or given.get("reduce") is not None:
        return None
    return reduction if reduction in ("none", "mean", "sum") else None


@rule(*named(_OF_ELEMENTS, F))
def of_elements(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A loss of each element, of operands of one shape."""
    if func is F.l1_loss and (weight := _weight_of_l1_loss()) is not None:
        return on_whole(func, args, {**kwargs, "weight": weight})
    by_batch = kwargs.get("reduction") == "batchmean"
    reduction = _reduction({**kwargs, "reduction": "sum"} if by_batch else kwargs)
    operands = aligned(args, kwargs)
    if reduction is None or operands is None or operands.dims != args[0].dim():
        return NotImplemented
    if len({operand.shape for operand in args}) > 1:
        return NotImplemented
    # Of other functions, the mean is that of the weights.
    if kwargs.get("weight") is not None and func not in (F.binary_cross_entropy, F.binary_cross_entropy_with_logits):
        return NotImplemented
    losses = operands.result(func(*operands.args, **{**operands.kwargs, "reduction": "none"}))
    if reduction == "none":
        return losses
    total = sum_or_mean(torch.mean if reduction == "mean" else torch.sum, (losses,), {})
    return total / args[0].shape[0] if by_batch else total


def _weight_of_l1_loss() -> Any:
    """The weight of a call of l1_loss, the one argument that PyTorch 2.13 does not hand on."""
    frame = sys._getframe(1)
    while frame is not None and frame.f_code is not F.l1_loss.__code__:
        frame = frame.f_back  # type: ignore[assignment]
    return frame and frame.f_locals.get("weight")


@rule(F.cross_entropy, F.nll_loss)
def of_classes(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A loss of classes, divided by the number of targets that count, or by their weights."""
    x, target = args
    reduction, weight = _reduction(kwargs), kwargs.get("weight")
    batches = [each for each in args if isinstance(each, BatchTensor)]
    if reduction is None or isinstance(weight, BatchTensor) or not batches or len(x.shape) < 2 or not target.shape:
        return NotImplemented
    rows = batches[0].rows
    if any(each.rows.dim for each in batches) or not x.shape[0] == target.shape[0] == rows.total:
        return NotImplemented
    own_x, own_target = part_of(x, rows, len(x.shape)), part_of(target, rows, len(target.shape))
    given = kwargs if weight is None else {**kwargs, "weight": for_rows(weight, rows)}
    if reduction == "none":
        return BatchTensor(func(own_x, own_target, **given), rows)
    if own_x.dtype in _HALVES:  # the sum of many rows is beyond them
        losses = func(own_x, own_target, **{**given, "reduction": "none"})
        own = losses.float().sum()
    else:
        own = losses = func(own_x, own_target, **{**given, "reduction": "sum"})
    # Autocast computes losses in float32, whatever it is given.
    dtype = losses.dtype
    if reduction == "sum":
        return sum_over_ranks(own, rows.ranks, func.__name__).to(dtype)
    if own_target.is_floating_point():
        count: Any = x.numel() // max(x.shape[1], 1)
    else:
        count = _count(own_target, weight, kwargs.get("ignore_index", -100))
    total = sum_over_ranks(own, rows.ranks, func.__name__, count)
    return total if total.dtype == dtype else total.to(dtype)


def _count(target: torch.Tensor, weight: torch.Tensor | None, ignored: int) -> torch.Tensor:
    """How many targets count, or what their weights add up to."""
    counts = target != ignored
    if weight is None:
        return counts.sum()
    return (weight.detach()[target.masked_fill(~counts, 0)] * counts).sum()
