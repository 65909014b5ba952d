"""Divides an optimizer's state like the divided parameters that replace its own."""

from __future__ import annotations

import torch
from torch.distributed.tensor import DTensor

from hpctrain.common.errors import HpctrainError
from hpctrain.worker.adapters.torch.pieces import local_pieces, local_tensor


def check_fits(name: str, value: torch.Tensor, old: torch.Tensor) -> None:
    """Raise HpctrainError for a tensor of an optimizer's state that is no number and not of its parameter's shape."""
    if value.numel() != 1 and value.shape != old.shape:
        raise HpctrainError(
            "HT-optimizer-state-not-divisible",
            "the optimizer keeps {name!r} of shape {shape} for a parameter of shape {parameter_shape}, "
            "which cannot be divided with it",
            "give ht.distribute a new optimizer, and load a checkpoint after it",
            name=name,
            shape=tuple(value.shape),
            parameter_shape=tuple(old.shape),
        )


@torch.no_grad()
def divided(name: str, value: torch.Tensor, old: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    """This rank's part of a tensor of the state, which every rank has whole. Numbers stay unchanged."""
    if not isinstance(new, DTensor) or (value.numel() == 1 and (name == "step" or new.numel() > 1)):
        return value
    check_fits(name, value, old)
    part = torch.empty_like(new, dtype=value.dtype, requires_grad=False)
    whole, local = value.view(new.shape), local_tensor(part)
    for slices, box in local_pieces(part):
        local[slices].copy_(whole[tuple(slice(b, e) for b, e in zip(box.offsets, box.ends, strict=True))])
    return part
