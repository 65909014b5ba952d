"""Divides a module over a mesh: tensor parallelism, then recomputation, then FSDP2."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NoReturn, cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module
from torch.utils.checkpoint import checkpoint

from hpctrain.common.errors import HpctrainError
from hpctrain.worker.adapters.torch.parallel.mesh import sizes_of
from hpctrain.worker.adapters.torch.parallel.overflow import agree_on_overflow
from hpctrain.worker.adapters.torch.parallel.plan import ParallelPlan, present


def divide(module: nn.Module, mesh: DeviceMesh, plan: ParallelPlan, *, keep: bool) -> None:
    """Divide a model, or a stage of one, whose parameters are equal on all ranks.

    Args:
        keep: whether to keep gathered parameters up to the backward pass, whatever the plan's stage of ZeRO.
    """
    sizes = sizes_of(mesh)
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


def parallelise_tensors(model: nn.Module, mesh: DeviceMesh, tensor: Mapping[str, ParallelStyle]) -> None:
    """Divide a model's layers over a 1-D mesh, on whose ranks it is equal. Names that it lacks are skipped.

    Raises:
        HpctrainError: modules that share a parameter are divided in different ways.
    """
    ties = tied_names(model)
    modules = dict(model.named_modules())
    for pattern, style in tensor.items():
        if present(modules, [pattern]):
            # The ranks are equal already, so nothing is sent.
            parallelize_module(model, mesh, {pattern: style}, src_data_rank=None)
    _replicate_rest(model, mesh)
    _tie_again(model, ties)


def tied_names(model: nn.Module) -> list[list[str]]:
    """The names of each parameter that has several."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return [each for each in names.values() if len(each) > 1]


def _tie_again(model: nn.Module, ties: Sequence[Sequence[str]]) -> None:
    """Share parameters again: parallelize_module has given each module one of its own."""
    for first, *others in ties:
        kept = model.get_parameter(first)
        for name in others:
            given = model.get_parameter(name)
            if given.placements != kept.placements:  # type: ignore[attr-defined]
                refuse_tie(first, name)
            path, _, attribute = name.rpartition(".")
            model.get_submodule(path).register_parameter(attribute, kept)


def refuse_tie(first: str, other: str) -> NoReturn:
    """Raise HpctrainError for two modules that share a parameter, which the plan divides in two ways."""
    raise HpctrainError(
        "HT-parallel-plan-not-valid",
        "{first!r} and {other!r} are one parameter, which the plan divides in two ways",
        "divide both along the same dimension (RowwiseParallel of an embedding, ColwiseParallel of a linear layer), or "
        "give each a parameter of its own",
        first=first,
        other=other,
    )


def _replicate_rest(model: nn.Module, mesh: DeviceMesh) -> None:
    for module in model.modules():
        whole = {name: each for name, each in module.named_parameters(recurse=False) if not isinstance(each, DTensor)}
        for name, parameter in whole.items():
            replica = distribute_tensor(parameter.detach(), mesh, [Replicate()], src_data_rank=None)
            module.register_parameter(name, nn.Parameter(replica, requires_grad=parameter.requires_grad))
        if whole:
            compute = _Whole(list(whole))
            module.register_forward_pre_hook(compute.begin)
            module.register_forward_hook(compute.end, always_call=True)


class _Whole:
    """Lets a module compute with plain tensors in place of its parameters, which are whole on every rank of tp.

    Its gradients are then equal on all of them, as its inputs are.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names

    def begin(self, module: nn.Module, _: Any) -> None:
        for name in self._names:
            parameter = cast(DTensor, module._parameters[name])
            # An object's own dictionary takes precedence over nn.Module's parameters.
            module.__dict__[name] = parameter.to_local(grad_placements=[Replicate()])

    def end(self, module: nn.Module, *_: Any) -> None:
        for name in self._names:
            module.__dict__.pop(name, None)
