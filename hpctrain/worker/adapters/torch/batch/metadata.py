"""What is known of a batch without its values, and what concerns the tensor and not its rows."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch

from hpctrain.worker.adapters.torch.batch.tensor import BatchTensor, named, rows_of, rule

T = torch.Tensor
_ATTRIBUTES = (
    "dtype device ndim layout names is_cuda is_cpu is_meta is_sparse is_quantized is_mkldnn is_xpu is_mps is_nested "
    "is_sparse_csr itemsize nbytes"
)


@rule(
    *named(_ATTRIBUTES, T),
    *named("size dim numel element_size __len__ is_floating_point is_complex is_signed", T, torch),
    *named("get_device is_inference is_conj is_neg has_names", T, torch),
)
def metadata(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    with torch._C.DisableTorchFunctionSubclass():
        return func(*args, **kwargs)


@rule(*named("new_zeros new_ones new_full", T))
def new(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A plain tensor of the batch's type, on its device."""
    return func(args[0].local, *args[1:], **kwargs)


@rule(T.requires_grad_)
def requires_grad(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    args[0].local.requires_grad_(*args[1:], **kwargs)
    return args[0]


@rule(T.retain_grad)
def retain_grad(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return args[0].local.retain_grad()


@rule(*named("data", T))
def data(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return BatchTensor(args[0].local.data, args[0].rows)


@rule(T.data.__set__)  # type: ignore[attr-defined]
def set_data(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    batch, value = args
    if not isinstance(batch, BatchTensor) or (batch.shape, batch.dtype) != (value.shape, value.dtype):
        return NotImplemented
    batch.local.data = rows_of(value, batch.rows)
    return None


@rule(T.__deepcopy__)
def deepcopy(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return BatchTensor(copy.deepcopy(args[0].local, *args[1:]), args[0].rows)


@rule(T.register_hook)
def register_hook(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    batch, hook = args

    def on_true_gradient(gradient: torch.Tensor) -> Any:
        ranks = batch.rows.ranks.size
        changed = hook(BatchTensor(gradient / ranks, batch.rows))
        return None if changed is None else rows_of(changed, batch.rows) * ranks

    return batch.local.register_hook(on_true_gradient)
