"""Tensors as one stretch of memory."""

from __future__ import annotations

import torch


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor in one dimension; a copy of one that is not contiguous."""
    whole = tensor.detach().contiguous()
    # A view could keep the stride of a dimension that holds one element or none, which the bytes may not have.
    return whole.as_strided((whole.numel(),), (1,))


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """:func:`flat` as bytes."""
    return flat(tensor).view(torch.uint8)


def give_back(tensor: torch.Tensor, whole: torch.Tensor) -> None:
    """Copy what was written to what :func:`flat` or :func:`as_bytes` made, if that is a copy."""
    if not tensor.is_contiguous():
        tensor.detach().copy_(whole.view(tensor.dtype).view(tensor.shape))
