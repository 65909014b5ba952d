"""Lets a GradScaler see an overflow of any rank.

PyTorch 2.13 agrees on one along those axes of a mesh on which the first gradient is divided
(``found_inf_reduce_handler`` in torch/distributed/tensor/_dispatch.py). Where that one is whole on every rank of tp, as
a normalisation's is, a rank whose part of another overflows would leave out a step that the others make.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

_OPERATION = torch.ops.aten._amp_foreach_non_finite_check_and_unscale_.default
_agreeing: list[bool] = []


def agree_on_overflow() -> None:
    """From now on, agree along all axes of the gradients' mesh. Idempotent."""
    if _agreeing:
        return
    _agreeing.append(True)
    handlers: dict[Any, Any] = DTensor._op_dispatcher._custom_op_handlers
    before = handlers[_OPERATION]

    def unscale(operation: Any, args: Any, kwargs: Any) -> None:
        before(operation, args, kwargs)
        gradients, found = args[0], args[1]
        for group in gradients[0].device_mesh.get_all_groups():
            dist.all_reduce(found, dist.ReduceOp.MAX, group)

    handlers[_OPERATION] = unscale


def count_as_checked(scaler: torch.amp.GradScaler, overflow: bool) -> None:
    """Tell a GradScaler what the other ranks found, where it has no gradient to look at and would end with an error."""
    unscale = type(scaler)._unscale_grads_

    def found(
        optimizer: torch.optim.Optimizer, inv_scale: torch.Tensor, found_inf: torch.Tensor, allow_fp16: bool
    ) -> dict[torch.device, torch.Tensor]:
        own = unscale(scaler, optimizer, inv_scale, found_inf, allow_fp16)
        return own or {found_inf.device: torch.full_like(found_inf, float(overflow))}

    scaler._unscale_grads_ = found  # type: ignore[method-assign]
