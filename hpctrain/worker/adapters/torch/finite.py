"""Checks that gradients are finite; each is read once."""

from __future__ import annotations

from collections.abc import Iterable

import torch


def all_finite(tensors: Iterable[torch.Tensor]) -> bool:
    """Whether every element of all tensors is finite. Waits for their device once."""
    tensors = [tensor.coalesce().values() if tensor.is_sparse else tensor for tensor in tensors]
    # Squares that add up to a finite sum are of finite numbers. Those of large numbers may not: they are looked at.
    return bool(torch.nn.utils.get_total_norm(tensors).isfinite()) or all(
        bool(tensor.isfinite().all()) for tensor in tensors
    )
