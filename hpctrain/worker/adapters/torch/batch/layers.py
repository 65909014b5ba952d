"""The functions and losses that networks consist of, outside of models: losses are summed over the ranks.

PyTorch hands these functions on with their operands by position and everything else by name.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional as F
from torch.utils._pytree import tree_map

from hpctrain.worker.adapters.torch.batch.elementwise import aligned, for_rows, part_of
from hpctrain.worker.adapters.torch.batch.ranks import sum_over_ranks
from hpctrain.worker.adapters.torch.batch.reductions import sum_or_mean
from hpctrain.worker.adapters.torch.batch.tensor import BatchTensor, named, on_whole, place_of, rule

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
        own = func(own_x, own_target, **{**given, "reduction": "none"}).float().sum()
    else:
        own = func(own_x, own_target, **{**given, "reduction": "sum"})
    if reduction == "sum":
        return sum_over_ranks(own, rows.ranks, func.__name__).to(x.dtype)
    if own_target.is_floating_point():
        count: Any = x.numel() // max(x.shape[1], 1)
    else:
        count = _count(own_target, weight, kwargs.get("ignore_index", -100))
    total = sum_over_ranks(own, rows.ranks, func.__name__, count)
    return total if total.dtype == x.dtype else total.to(x.dtype)


def _count(target: torch.Tensor, weight: torch.Tensor | None, ignored: int) -> torch.Tensor:
    """How many targets count, or what their weights add up to."""
    counts = target != ignored
    if weight is None:
        return counts.sum()
    return (weight.detach()[target.masked_fill(~counts, 0)] * counts).sum()


T = torch.Tensor
# The fewest dimensions with which a function takes the first one for samples.
_OF_SAMPLES = {
    2: "group_norm prelu",
    3: "conv1d conv_transpose1d max_pool1d max_pool1d_with_indices avg_pool1d adaptive_avg_pool1d adaptive_max_pool1d "
    "interpolate instance_norm local_response_norm",
    4: "conv2d conv_transpose2d max_pool2d max_pool2d_with_indices avg_pool2d adaptive_avg_pool2d adaptive_max_pool2d "
    "pixel_shuffle pixel_unshuffle channel_shuffle unfold",
    5: "conv3d conv_transpose3d max_pool3d max_pool3d_with_indices avg_pool3d adaptive_avg_pool3d adaptive_max_pool3d",
}
_fewest = {func: dims for dims, names in _OF_SAMPLES.items() for func in named(names, F, torch)}
del _fewest[torch.instance_norm]  # whose arguments differ


@rule(*_fewest, F.pad)
def of_samples(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A function of each sample, the first dimension."""
    x = args[0]
    fewest = len(args[1]) // 2 + 1 if func is F.pad else _fewest[func]
    if not isinstance(x, BatchTensor) or x.rows.dim or x.dim() < fewest or 0 in x.rows.sizes:
        return NotImplemented
    if kwargs.get("use_input_stats") and kwargs.get("running_mean") is not None:
        return NotImplemented  # a change of the statistics
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
