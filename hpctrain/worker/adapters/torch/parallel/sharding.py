"""Divides a module over a mesh: tensor parallelism, then recomputation, then FSDP2."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.utils.checkpoint import checkpoint

from hpctrain.common.errors import HpctrainError
from hpctrain.worker.adapters.torch.parallel.mesh import sizes_of
from hpctrain.worker.adapters.torch.parallel.overflow import agree_on_overflow
from hpctrain.worker.adapters.torch.parallel.plan import ParallelPlan, present
from hpctrain.worker.adapters.torch.parallel.tensor import parallelise_tensors, tied_names
from hpctrain.worker.adapters.torch.refusals import set_divided


def divide(module: nn.Module, mesh: DeviceMesh, plan: ParallelPlan, *, keep: bool) -> None:
    """Divide a model, or a stage of one, whose parameters are equal on all ranks.

    Args:
        keep: whether to keep gathered parameters up to the backward pass, whatever the plan's stage of ZeRO.
    """
    sizes = sizes_of(mesh)
    set_divided(module)
    if sizes["tp"] > 1:
        parallelise_tensors(module, mesh["tp"], plan.tensor)
        agree_on_overflow()
    recompute(module, plan)
    if sizes["dp_replicate"] * sizes["dp_shard"] == 1 and plan.precision is None:
        return
    axes: Any = ("dp_replicate", "dp_shard") if sizes["dp_replicate"] > 1 else "dp_shard"
    settings: dict[str, Any] = {"mesh": mesh[axes], "mp_policy": _precision(plan)}
    modules = dict(module.named_modules())
    units = [name for name in modules if name and name in present(modules, plan.shard)]
    _check_ties(module, units)
    # From the inside out: each unit takes the parameters that no unit within it has taken.
    for name in reversed(units):
        fully_shard(modules[name], reshard_after_forward=plan.zero == 3 and not keep, **settings)
    # None is PyTorch's default: keep the root's parameters, which the backward pass needs first.
    fully_shard(module, reshard_after_forward=None if plan.zero == 3 and not keep else False, **settings)


def recompute(module: nn.Module, plan: ParallelPlan) -> None:
    """Have the activations of the plan's modules computed again in the backward pass.

    Schedules that compute the gradients of inputs and of weights apart recompute twice, which PyTorch's composable
    ``checkpoint`` cannot.
    """
    modules = dict(module.named_modules())
    for name in present(modules, plan.recompute):
        part = modules[name]
        part.forward = partial(checkpoint, part.forward, use_reentrant=False)


def _precision(plan: ParallelPlan) -> MixedPrecisionPolicy:
    if plan.precision is None:
        return MixedPrecisionPolicy()
    return MixedPrecisionPolicy(param_dtype=plan.precision, reduce_dtype=torch.float32)


def _check_ties(module: nn.Module, units: list[str]) -> None:
    """Refuse a parameter of two units: each parameter is gathered with one, and the other would lose it."""
    for names in tied_names(module):
        owners = {next((unit for unit in reversed(units) if name.startswith(f"{unit}.")), "") for name in names}
        if len(owners) > 1:
            raise HpctrainError(
                "HT-parallel-plan-not-valid",
                "{names} are one parameter, but the plan's shard names only some of the modules that have it",
                "leave the modules that share it out of shard: they are gathered with the whole model",
                names=" and ".join(map(repr, names)),
            )


def groups_of(root: nn.Module) -> list[FSDPParamGroup]:
    """The parameters that FSDP2 gathers and reduces together, in one order on all ranks.

    Args:
        root: the module to which ``fully_shard`` was applied last.
    """
    state: Any = root._get_fsdp_state()  # type: ignore[operator]
    # Otherwise the first part that is called becomes a root itself, and the model cannot be called any more.
    state._lazy_init()
    return [group for each in state._state_ctx.all_states for group in each._fsdp_param_groups]


def reshard(module: nn.Module) -> None:
    """Free the gathered parameters, which FSDP2 would keep in place of this rank's parts without a backward pass."""
    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.reshard()
