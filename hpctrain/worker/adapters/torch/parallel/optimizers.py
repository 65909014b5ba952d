"""Makes an optimizer of plain parameters one of their DTensors, and lets GradScalers of such ones agree."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map_only

from hpctrain.common.errors import HpctrainError
from hpctrain.worker.adapters.torch.optimizer_contents import Optimizer, optimizers_in, parameters_of, whole_of
from hpctrain.worker.adapters.torch.tensor_pieces import local_pieces, local_tensor

New = Mapping[int, Sequence[nn.Parameter]]

# Their operations on several tensors at once are exact with DTensors; those of ASGD are not, and others lack some.
_FOREACH = (
    *(torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adamax, torch.optim.NAdam, torch.optim.RAdam),
    *(torch.optim.Adadelta, torch.optim.Adagrad, torch.optim.RMSprop),
)
# By package and class: they compute with parts of divided parameters as if these were whole, without an error.
_NEED_WHOLE = {("torch", "Muon"), ("pytorch_optimizer", "Gravity"), ("pytorch_optimizer", "Nero")}


class Rewiring:
    """Which parameters of a model its optimizers update, by name. Create it before the parameters are replaced."""

    def __init__(self, model: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        self._optimizers = optimizers
        self._old = dict(model.named_parameters(remove_duplicate=False))
        known = {id(each) for each in self._old.values()}
        for optimizer in optimizers:
            _check(optimizer, known)

    def apply(self, models: Iterable[nn.Module]) -> None:
        """Give each optimizer the parameters that now have its parameters' names, except names that no model has."""
        new = {name: each for model in models for name, each in model.named_parameters(remove_duplicate=False)}
        now: dict[int, dict[int, nn.Parameter]] = {}
        for name, old in self._old.items():
            own = now.setdefault(id(old), {})
            if name in new:
                own.setdefault(id(new[name]), new[name])
        for optimizer in self._optimizers:
            rewire(optimizer, {old: list(each.values()) for old, each in now.items()})
        self._old.clear()


def rewire(optimizer: Optimizer, now: New) -> None:
    """Replace an optimizer's parameters in its groups, lists and state, and divide the state for them.

    Lists and dictionaries are changed in place, because an optimizer, or one around it, may share them.

    Args:
        now: the replacements by the ``id`` of each old parameter, several or none.
    """
    for each in optimizers_in(optimizer):
        for group in each.param_groups:
            if "param_names" in group:
                names = zip(group["param_names"], group["params"], strict=True)
                group["param_names"][:] = [name for name, old in names for _ in now.get(id(old), [old])]
        lists = (value for value in vars(each).values() if isinstance(value, list))
        for parameters in (*(group["params"] for group in each.param_groups), *lists):
            parameters[:] = [new for old in parameters for new in now.get(id(old), [old])]
        _move_state(each.state, now)
        _update_together(each)


def _move_state(state: dict[Any, Any], now: New) -> None:
    for old in [each for each in state if id(each) in now]:
        kept = state.pop(old)
        for new in now[id(old)]:
            state[new] = {name: _moved(str(name), value, old, new) for name, value in kept.items()}


def _moved(name: str, value: Any, old: torch.Tensor, new: torch.Tensor) -> Any:
    return tree_map_only(torch.Tensor, lambda tensor: _divided(name, tensor, old, new), value)


@torch.no_grad()
def _divided(name: str, value: torch.Tensor, old: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    """This rank's part of a tensor of the state, which every rank has whole. Numbers stay unchanged."""
    if not isinstance(new, DTensor) or (value.numel() == 1 and (name == "step" or new.numel() > 1)):
        return value
    if value.numel() != 1 and value.shape != old.shape:
        raise HpctrainError(
            "HT-optimizer-not-supported",
            "the optimizer keeps {name!r} of shape {shape} for a parameter of shape {parameter_shape}, "
            "which cannot be divided with it",
            "give ht.distribute a new optimizer, and load a checkpoint after it",
            name=name,
            shape=tuple(value.shape),
            parameter_shape=tuple(old.shape),
        )
    part = torch.empty_like(new, dtype=value.dtype, requires_grad=False)
    whole, local = value.view(new.shape), local_tensor(part)
    for slices, box in local_pieces(part):
        local[slices].copy_(whole[tuple(slice(b, e) for b, e in zip(box.offsets, box.ends, strict=True))])
    return part


def _check(optimizer: Optimizer, known: set[int]) -> None:
    foreign = next((each for each in parameters_of(optimizer) if id(each) not in known), None)
    if foreign is not None:
        raise HpctrainError(
            "HT-optimizer-other-parameters",
            "{optimizer} updates a parameter of shape {shape} that the model does not have",
            "make the optimizer from model.parameters(), after the model's last layer was added or replaced",
            optimizer=type(optimizer).__name__,
            shape=tuple(foreign.shape),
        )
    if any((kind.__module__.partition(".")[0], kind.__name__) in _NEED_WHOLE for kind in type(optimizer).__mro__):
        raise HpctrainError(
            "HT-optimizer-not-supported",
            "{optimizer} computes other numbers from divided parameters than from whole ones",
            "choose another optimizer (docs/optimizers.md), or a mesh of dp_replicate alone",
            optimizer=type(optimizer).__name__,
        )


def _update_together(optimizer: Optimizer) -> None:
    """Let an optimizer of DTensors update all of them at once, since a loop spends its time on dispatch.

    The script's own choice stays. Rules that are not known to be exact that way get a loop.
    """
    for group in optimizer.param_groups:
        parameters, chosen = group["params"], group.get("foreach", False) is not None or group.get("fused") is not None
        if not chosen and any(isinstance(each, DTensor) for each in parameters):
            fits = type(optimizer) in _FOREACH and all(each.is_floating_point() for each in parameters)
            group["foreach"] = fits and not group.get("capturable") and not group.get("differentiable")


def agree_on_overflow(optimizers: Sequence[Optimizer], mesh: DeviceMesh) -> None:
    """From now on, a GradScaler leaves out a step of these optimizers on all ranks of the mesh, or on none.

    PyTorch asks the ranks that divide the first gradient alone, and those of other stages and layers may not overflow.
    """
    for optimizer in optimizers:
        for each in optimizers_in(optimizer):
            each._hpctrain_mesh = mesh  # type: ignore[attr-defined]
    unscale = torch.amp.GradScaler._unscale_grads_
    if hasattr(unscale, "agrees"):
        return

    def unscale_alike(
        scaler: torch.amp.GradScaler, optimizer: Optimizer, inverse: torch.Tensor, found: torch.Tensor, allow_fp16: bool
    ) -> dict[torch.device, torch.Tensor]:
        # With ZeRO 1 a script clips the whole gradients after ``unscale_``; the parts have some within a step only.
        groups = [{"params": [whole_of(each) for each in group["params"]]} for group in optimizer.param_groups]
        # It reads only the groups of an optimizer.
        of_groups: Any = SimpleNamespace(param_groups=groups)
        by_device = unscale(scaler, of_groups, inverse, found, allow_fp16)
        ranks: DeviceMesh | None = getattr(optimizer, "_hpctrain_mesh", None)
        if ranks is not None:
            by_device = by_device or {found.device: found}  # The stages of a rank may be frozen.
            for overflow, group in itertools.product(by_device.values(), ranks.get_all_groups()):
                dist.all_reduce(overflow, dist.ReduceOp.MAX, group)
        return by_device

    unscale_alike.agrees = True  # type: ignore[attr-defined]
    torch.amp.GradScaler._unscale_grads_ = unscale_alike  # type: ignore[method-assign, assignment]
