"""Contiguous one-dimensional views or copies of tensors."""

from __future__ import annotations

import torch


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor in one dimension; a copy of one that is not contiguous."""
    whole = tensor.detach().contiguous()
    # Not view(-1), which may keep the odd stride of a dimension of one element or none; a view as bytes refuses it.
    return whole.as_strided((whole.numel(),), (1,))


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's bytes in one dimension; a copy of a tensor that is not contiguous."""
    return flat(tensor).view(torch.uint8)


def give_back(tensor: torch.Tensor, whole: torch.Tensor) -> None:
    """Copy the result of :func:`flat` or :func:`as_bytes` back to its tensor, if it was a copy."""
    if not tensor.is_contiguous():
        tensor.detach().copy_(whole.view(tensor.dtype).view(tensor.shape))
