"""Facts about single operators of PyTorch: their FLOPs, their traffic, and their type under autocast."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

aten = torch.ops.aten

CONVOLUTIONS = frozenset({aten.convolution, aten._convolution, aten.cudnn_convolution})
# Attention in one kernel on a CPU, which PyTorch's own FLOP counter leaves out.
_ATTENTION = aten._scaled_dot_product_flash_attention_for_cpu
_ATTENTION_BACKWARD = aten._scaled_dot_product_flash_attention_for_cpu_backward
# Elementwise operators that PyTorch does not tag as such.
POINTWISE = frozenset(
    {
        aten.native_dropout,
        aten.native_dropout_backward,
        aten.copy_,
        aten.clone,
        aten._to_copy,
        aten.where,
        aten.masked_fill,
    }
)
_CREATED = frozenset({aten.zeros, aten.ones, aten.full, aten.new_zeros, aten.new_ones, aten.new_full})
_LIKE = frozenset({aten.zeros_like, aten.ones_like, aten.full_like, aten.zero_, aten.fill_})
_UNINITIALISED = frozenset(
    {aten.empty, aten.empty_strided, aten.new_empty, aten.new_empty_strided, aten.empty_like, aten.empty_permuted}
)
# These read only the rows that they return.
_LOOKUPS = frozenset({aten.embedding, aten.index, aten.index_select, aten.gather})
# Their float32 statistics are no reason to compute in float32, unlike what they normalise.
NORMALISATIONS = frozenset({aten.native_batch_norm, aten._native_batch_norm_legit, aten.cudnn_batch_norm})
# CUDA operators that autocast to float32: https://docs.pytorch.org/docs/stable/amp.html#cuda-ops-that-can-autocast-to-float32
WIDE = frozenset(
    {
        aten.native_layer_norm,
        aten.native_group_norm,
        aten._fused_rms_norm,
        aten._softmax,
        aten._log_softmax,
        aten.nll_loss_forward,
        aten.nll_loss2d_forward,
        aten.binary_cross_entropy_with_logits,
        aten.mse_loss,
        aten.smooth_l1_loss,
        aten.huber_loss,
        aten.soft_margin_loss,
        aten.multi_margin_loss,
        aten.softplus,
        aten.exp,
        aten.expm1,
        aten.log,
        aten.log1p,
        aten.log2,
        aten.log10,
        aten.logsumexp,
        aten.acos,
        aten.asin,
        aten.cosh,
        aten.sinh,
        aten.tan,
        aten.erfinv,
        aten.pow,
        aten.prod,
        aten.sum,
        aten.cumsum,
        aten.cumprod,
        aten.reciprocal,
        aten.rsqrt,
        aten.linalg_vector_norm,
        aten.norm,
        aten.upsample_nearest1d,
        aten.upsample_nearest2d,
        aten.upsample_nearest3d,
        aten.upsample_linear1d,
        aten.upsample_bilinear2d,
        aten.upsample_trilinear3d,
        aten.upsample_bicubic2d,
        aten._upsample_nearest_exact1d,
        aten._upsample_nearest_exact2d,
        aten._upsample_nearest_exact3d,
        aten._upsample_bilinear2d_aa,
        aten._upsample_bicubic2d_aa,
    }
)


def flops(packet: Any, args: Any, kwargs: Any, out: Any) -> int:
    """The FLOPs of a convolution, matrix product or attention by PyTorch's formulas, a multiply-add being 2; else 0."""
    if packet is _ATTENTION:
        return int(sdpa_flop_count(*(each.shape for each in args[:3])))
    if packet is _ATTENTION_BACKWARD:
        return int(sdpa_backward_flop_count(*(each.shape for each in args[:4])))
    formula = flop_registry.get(packet)
    return int(formula(*args, **kwargs, out_val=out)) if formula else 0


def kind(packet: Any) -> Literal["conv", "matmul", "other"]:
    """How a GPU's matrix units compute a forward operator."""
    if packet in CONVOLUTIONS:
        return "conv"
    return "matmul" if packet is _ATTENTION or packet in flop_registry else "other"


def is_creation(packet: Any) -> Literal["filled", "uninitialised"] | None:
    """Whether an operator reads nothing and only allocates memory, which it fills or leaves uninitialised."""
    if packet in _UNINITIALISED:
        return "uninitialised"
    return "filled" if packet in _CREATED or packet in _LIKE else None


def is_lookup(packet: Any) -> bool:
    """Whether an operator reads only as much of its first tensor as it returns."""
    return packet in _LOOKUPS
