"""Checks that gradients are finite; each is read once."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch


def all_finite(tensors: Iterable[torch.Tensor]) -> bool:
    """Whether every element of all tensors is finite. Waits for their device once."""
    tensors = [tensor.coalesce().values() if tensor.is_sparse else tensor for tensor in tensors]
    # A finite norm proves all numbers finite. Squares of large finite numbers may overflow: check each element then.
    return math.isfinite(torch.nn.utils.get_total_norm(tensors)) or all(
        bool(tensor.isfinite().all()) for tensor in tensors
    )
