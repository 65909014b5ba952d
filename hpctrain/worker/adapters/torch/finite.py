"""Checks that gradients are finite; each is read once."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch


def values_of(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """The tensors, of sparse ones the elements that are there."""
    return [tensor.coalesce().values() if tensor.is_sparse else tensor for tensor in tensors]


def are_finite(values: Iterable[torch.Tensor], norm: float) -> bool:
    """Whether every element is finite, with the norm over all of them known. Waits only where that is not finite."""
    # A finite norm proves all numbers finite. Squares of large finite numbers may overflow: check each element then.
    return math.isfinite(norm) or all(bool(each.isfinite().all()) for each in values)
