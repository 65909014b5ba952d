"""The functions that networks consist of, outside of models: each row by itself, with weights that all rows share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional as F
from torch.utils._pytree import tree_map

from hpctrain.worker.adapters.torch.batch.elementwise import aligned, for_rows
from hpctrain.worker.adapters.torch.batch.tensor import BatchTensor, named, place_of, rule

T = torch.Tensor
# The fewest dimensions with which a function takes the first one for samples.
_OF_SAMPLES = {
    2: "group_norm prelu batch_norm",
    3: "conv1d conv_transpose1d max_pool1d max_pool1d_with_indices avg_pool1d adaptive_avg_pool1d adaptive_max_pool1d "
    "interpolate instance_norm local_response_norm",
    4: "conv2d conv_transpose2d max_pool2d max_pool2d_with_indices avg_pool2d adaptive_avg_pool2d adaptive_max_pool2d "
    "pixel_shuffle pixel_unshuffle channel_shuffle unfold",
    5: "conv3d conv_transpose3d max_pool3d max_pool3d_with_indices avg_pool3d adaptive_avg_pool3d adaptive_max_pool3d",
}
_fewest = {func: dims for dims, names in _OF_SAMPLES.items() for func in named(names, F, torch)}
del _fewest[torch.batch_norm], _fewest[torch.instance_norm]  # whose arguments differ


@rule(*_fewest, F.pad)
def of_samples(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A function of each sample, the first dimension."""
    x = args[0]
    fewest = len(args[1]) // 2 + 1 if func is F.pad else _fewest[func]
    if not isinstance(x, BatchTensor) or x.rows.dim or x.dim() < fewest or 0 in x.rows.sizes:
        return NotImplemented
    # These compute statistics of the batch, or change them.
    if func in (F.batch_norm, F.instance_norm) and _uses_batch(func, args, kwargs):
        return NotImplemented
    return _with_shared(func, x, args, kwargs)


def _uses_batch(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    if func is F.batch_norm:
        return bool(kwargs.get("training"))
    return bool(kwargs.get("use_input_stats")) and kwargs.get("running_mean") is not None


@rule(*named("linear layer_norm rms_norm embedding", F))
def of_last(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A function of the last dimensions."""
    x = args[0]
    last = {F.linear: 1, F.embedding: 0}.get(func) if func in (F.linear, F.embedding) else len(args[1])
    if not isinstance(x, BatchTensor) or x.rows.dim >= x.dim() - (last or 0):
        return NotImplemented
    # Rescaling the weights, or gradients by how often a row occurs, concerns the whole batch.
    if any(kwargs.get(name) for name in ("max_norm", "scale_grad_by_freq", "sparse")):
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


@rule(*named("scaled_dot_product_attention pairwise_distance cosine_similarity", F), torch.cdist)
def of_pairs(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A function of the last dimensions of several operands, whose leading dimensions are broadcast."""
    last = 1 if func in (F.pairwise_distance, F.cosine_similarity) else 2
    if kwargs.get("dropout_p") or len(args) > (2 if last == 1 else 4) or kwargs.get("dim", -1) != -1:
        return NotImplemented
    operands = aligned(args, kwargs)
    if operands is None or operands.from_end <= last or 0 in operands.rows.sizes:
        return NotImplemented
    result = func(*operands.args, **operands.kwargs)
    return BatchTensor(result, operands.rows.along(operands.dims - operands.from_end))


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
