"""Losses of torch.nn.functional: the sum of this rank's rows, added up over the ranks, divided by what one process divides by."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch.nn import functional as F

from hpctrain.worker.adapters.torch.batch.collectives import sum_over_ranks
from hpctrain.worker.adapters.torch.batch.elementwise import aligned, for_rows, part_of
from hpctrain.worker.adapters.torch.batch.tensor import BatchTensor, named, rule

_OF_ELEMENTS = """
mse_loss l1_loss smooth_l1_loss huber_loss binary_cross_entropy binary_cross_entropy_with_logits soft_margin_loss
poisson_nll_loss kl_div
"""
_OF_ROWS = """
cosine_embedding_loss margin_ranking_loss triplet_margin_loss multi_margin_loss multilabel_margin_loss
multilabel_soft_margin_loss gaussian_nll_loss hinge_embedding_loss
"""


@lru_cache(maxsize=64)
def _signature(func: Callable[..., Any]) -> inspect.Signature:
    return inspect.signature(func)


def _stated(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """All arguments by name, but for those that are not given."""
    return dict(_signature(func).bind(*args, **kwargs).arguments)


def _reduction(given: dict[str, Any]) -> str | None:
    """How the losses are reduced; None where the outdated arguments say it."""
    if given.get("size_average") is not None or given.get("reduce") is not None:
        return None
    return given.get("reduction", "mean")


@rule(*named(_OF_ELEMENTS, F))
def of_elements(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A loss of each element, of operands of one shape."""
    given = _stated(func, args, kwargs)
    reduction = _reduction(given)
    operands = aligned((), given)
    x = given.get("input")
    target = given.get("target")
    if reduction is None or operands is None or not isinstance(x, torch.Tensor) or not isinstance(target, torch.Tensor):
        return NotImplemented
    if x.shape != target.shape or operands.dims != x.dim():
        return NotImplemented
    if reduction == "none":
        return operands.result(func(**operands.kwargs))
    total = sum_over_ranks(func(**{**operands.kwargs, "reduction": "sum"}), operands.rows.ranks, func.__name__)
    if reduction == "batchmean":
        return total / x.shape[0]
    return total if reduction == "sum" else total / x.numel()


@rule(*named(_OF_ROWS, F))
def of_rows(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A loss of each row, of operands whose rows are their first dimension."""
    given = _stated(func, args, kwargs)
    reduction = _reduction(given)
    tensors = [each for each in given.values() if isinstance(each, torch.Tensor)]
    batches = [each for each in tensors if isinstance(each, BatchTensor)]
    first = batches[0]
    rows = first.rows
    if reduction is None or any(each.rows.dim or each.rows.sizes != rows.sizes for each in batches):
        return NotImplemented
    if any(each.dim() != first.dim() and each.dim() != 1 for each in tensors) or first.dim() < 1:
        return NotImplemented
    if any(each.shape[:1] != first.shape[:1] and "weight" not in given for each in tensors) or rows.total < 2:
        return NotImplemented
    if any(not isinstance(each, BatchTensor) for each in tensors):
        return NotImplemented
    local = {name: each.local if isinstance(each, BatchTensor) else each for name, each in given.items()}
    losses = func(**{**local, "reduction": "none"})
    if losses.dim() < 1 or losses.shape[0] != rows.size:
        return NotImplemented
    if reduction == "none":
        return BatchTensor(losses, rows)
    total = sum_over_ranks(losses.sum(), rows.ranks, func.__name__)
    return total if reduction == "sum" else total / (rows.total * losses.shape[1:].numel())


@rule(F.cross_entropy, F.nll_loss)
def of_classes(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A loss of classes, divided by the number of targets that count, or by their weights."""
    given = _stated(func, args, kwargs)
    reduction = _reduction(given)
    x, target, weight = given["input"], given["target"], given.get("weight")
    if reduction is None or isinstance(weight, BatchTensor) or x.dim() < 2:
        return NotImplemented
    operand = x if isinstance(x, BatchTensor) else target
    if (
        not isinstance(operand, BatchTensor)
        or operand.rows.dim
        or x.shape[0] != target.shape[0]
        or operand.rows.total < 2
    ):
        return NotImplemented
    rows = operand.rows
    # The rows are the first dimension of both, which differ in their number of dimensions.
    own_x, own_target = part_of(x, rows, x.dim()), part_of(target, rows, target.dim())
    if weight is not None:
        weight = given["weight"] = for_rows(weight, rows)
    given.update(input=own_x, target=own_target)
    if reduction == "none":
        return BatchTensor(func(**given), rows)
    own = func(**{**given, "reduction": "sum"})
    if reduction == "sum":
        return sum_over_ranks(own, rows.ranks, func.__name__)
    if own_target.is_floating_point():
        return sum_over_ranks(own, rows.ranks, func.__name__) / (target.numel() // max(target.shape[1], 1))
    counts = own_target != given.get("ignore_index", -100)
    count = counts.sum() if weight is None else (weight.detach()[own_target.masked_fill(~counts, 0)] * counts).sum()
    both = sum_over_ranks(torch.stack([own, count.to(own.dtype)]), rows.ranks, func.__name__)
    return both[0] / both[1].detach()
