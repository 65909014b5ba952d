"""Lets a GradScaler see an overflow of any rank, and the gradients of an optimizer whose state is divided.

PyTorch 2.13 exchanges overflows along those axes of a mesh on which the first gradient is divided
(``found_inf_reduce_handler`` in torch/distributed/tensor/_dispatch.py). If that gradient is whole on every rank of tp,
as a normalisation's is, a rank whose part of another gradient overflows would skip a step that the others make.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from hpctrain.worker.adapters.torch.optimizer_contents import whole_of

_OPERATION = torch.ops.aten._amp_foreach_non_finite_check_and_unscale_.default
_agreeing: list[bool] = []
_unscaling: list[object] = []


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


def unscale_whole_gradients() -> None:
    """From now on, a GradScaler unscales the whole gradients of optimizers that have parts of parameters. Idempotent.

    With ZeRO 1 the parts have gradients within a step only, and a script clips the whole ones after ``unscale_``. Those
    are equal on all ranks, so all ranks find the same overflow.
    """
    if _unscaling:
        return
    unscale = torch.amp.GradScaler._unscale_grads_
    _unscaling.append(unscale)

    def unscale_whole(scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer, *arguments: Any) -> Any:
        groups = [{"params": [whole_of(each) for each in group["params"]]} for group in optimizer.param_groups]
        # _unscale_grads_ reads only the groups of an optimizer.
        return unscale(scaler, SimpleNamespace(param_groups=groups), *arguments)  # type: ignore[arg-type]

    torch.amp.GradScaler._unscale_grads_ = unscale_whole  # type: ignore[method-assign, assignment]


def count_as_checked(scaler: torch.amp.GradScaler, overflow: bool) -> None:
    """Give a GradScaler without gradients, which would raise an error, the overflow that the other ranks found."""
    unscale = type(scaler)._unscale_grads_

    def found(
        optimizer: torch.optim.Optimizer, inv_scale: torch.Tensor, found_inf: torch.Tensor, allow_fp16: bool
    ) -> dict[torch.device, torch.Tensor]:
        own = unscale(scaler, optimizer, inv_scale, found_inf, allow_fp16)
        return own or {found_inf.device: torch.full_like(found_inf, float(overflow))}

    scaler._unscale_grads_ = found  # type: ignore[method-assign]
