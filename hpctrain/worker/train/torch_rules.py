"""Makes a recipe's optimizer in PyTorch: PyTorch's own, or :mod:`hpctrain.common.optim.rules` on lists of tensors.

Each operation of a rule is one of PyTorch's kernels for lists. No operation waits for a GPU.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from hpctrain.common.optim import rules
from hpctrain.common.optim.rules import TOGETHER, Array, Operations, ParameterKind, Rule, UpdateStep
from hpctrain.common.recipes.optimizers import SCALARS, Optimizer
from hpctrain.worker.adapters.torch.tensor_pieces import is_dtensor, laid_out, local_tensor
from hpctrain.worker.train.torch_finetuning import rate_factors

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

Tensors = list[torch.Tensor]
State = dict[str, torch.Tensor]

# _NormBase is the base class of BatchNorm in any number of dimensions, SyncBatchNorm and InstanceNorm.
_NORMALISATIONS = (nn.modules.batchnorm._NormBase, nn.GroupNorm, nn.LayerNorm, nn.RMSNorm)


def make_optimizer(settings: Optimizer, model: nn.Module, *, divided: bool = False) -> torch.optim.Optimizer:
    """The optimizer of a recipe for the trained parameters of a model, grouped by their settings.

    It is PyTorch's own where the update is the same. Before each step, set ``lr`` of all groups to the rate times the
    group's ``factor``, and for rmsprop_to_sgd ``sgd_share`` too
    (:func:`hpctrain.common.optim.learning_rate.sgd_share`).

    Args:
        divided: the parameters will be divided over ranks; what divides them then chooses PyTorch's kernels.
    """
    groups = _groups(model, rate_factors(model, settings.rates))
    decayed = _decayed(settings, groups)
    rate, epsilon = settings.learning_rate, settings.divisor_epsilon
    fused = None if divided else True
    match settings.name:
        case "adam":
            return torch.optim.Adam(decayed, rate, betas=settings.betas, eps=epsilon, fused=fused)
        case "adamw":
            return torch.optim.AdamW(decayed, rate, betas=settings.betas, eps=epsilon, fused=fused)
        case "sgd" if not settings.rate_in_momentum:
            return torch.optim.SGD(decayed, rate, momentum=settings.momentum, nesterov=settings.nesterov, fused=fused)
        case _:
            return TorchRuleOptimizer(groups, settings)


def parameter_kinds(model: nn.Module) -> dict[str, ParameterKind]:
    """The kind of each parameter in the layer that owns it, by its name in ``model.named_parameters()``.

    ``norm`` is all that layers of torch.nn's normalisations, and of classes derived from them, own, ``shortcut_norm``
    where the layer is a part of a ``downsample``; ``bias`` is what another layer calls so. A parameter that several
    layers share is what it is to the first of them.
    """
    owners = {name: name.rpartition(".") for name, _ in model.named_parameters()}
    return {name: _kind(model.get_submodule(owner), owner, own) for name, (owner, _, own) in owners.items()}


def total_norm(parameters: Iterable[torch.nn.Parameter]) -> torch.Tensor:
    """The norm over the gradients of all parameters. Where they are divided over ranks, collective."""
    norm = torch.nn.utils.get_total_norm([each.grad for each in parameters if each.grad is not None])
    whole: torch.Tensor = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
    return whole


@torch.no_grad()
def scale_gradients(gradients: Iterable[torch.Tensor], bound: float, norm: torch.Tensor) -> None:
    """Clip gradients: scale them by min(1, bound / norm), as TensorFlow and Keras do.

    torch.nn.utils.clip_grad_norm_ divides by the norm + 1e-6.

    Args:
        norm: the norm over all of them, see :func:`total_norm`.
    """
    # A norm of 0 gives infinity, clamped to 1; norm - norm is NaN for a norm that is not finite, else 0.
    scale = torch.clamp(bound / norm, max=1.0) + (norm - norm)
    # One kernel for all of them, of which a pipeline's rank may have none.
    if own := [local_tensor(each) for each in gradients]:
        torch._foreach_mul_(own, scale.to(own[0].device))


def _groups(model: nn.Module, factors: Mapping[str, float]) -> list[dict[str, Any]]:
    kinds, parameters = parameter_kinds(model), dict(model.named_parameters())
    members: dict[tuple[ParameterKind, float], list[nn.Parameter]] = {}
    for name, factor in factors.items():
        members.setdefault((kinds[name], factor), []).append(parameters[name])
    return [{"params": own, "kind": kind, "factor": factor} for (kind, factor), own in members.items()]


def _decayed(settings: Optimizer, groups: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The groups of PyTorch's own optimizers, which know no kinds."""
    members: dict[tuple[float, float], list[nn.Parameter]] = {}
    for group in groups:
        key = rules.decay(settings, group["kind"]), group["factor"]
        members.setdefault(key, []).extend(group["params"])
    return [{"params": own, "weight_decay": decay, "factor": factor} for (decay, factor), own in members.items()]


def _kind(owner: nn.Module, path: str, name: str) -> ParameterKind:
    if isinstance(owner, _NORMALISATIONS):
        return "shortcut_norm" if "downsample" in path.split(".") else "norm"
    # Recurrent layers have bias_ih_l0, attention in_proj_bias.
    return "bias" if name == "bias" or name.startswith("bias_") or name.endswith("_bias") else "weight"


class TensorList:
    """Tensors that operators work on together.

    The other operand is a number, another list, or a vector with a number for each tensor.
    """

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        self.tensors = list(tensors)

    def __add__(self, other: Array) -> TensorList:
        return TensorList(torch._foreach_add(self.tensors, _operand(other)))

    def __mul__(self, other: Array) -> TensorList:
        return TensorList(torch._foreach_mul(self.tensors, _operand(other)))

    def __truediv__(self, other: Array) -> TensorList:
        return TensorList(torch._foreach_div(self.tensors, _operand(other)))


def _operand(other: Array) -> Any:
    if isinstance(other, TensorList):
        return other.tensors
    return list(other.unbind()) if isinstance(other, torch.Tensor) else other


def _operations(ranks: Sequence[ProcessGroup]) -> Operations:
    """The operations on parameters that are divided over ranks, or over none."""

    def norm(array: TensorList) -> torch.Tensor:
        norms = torch.stack(list(torch._foreach_norm(array.tensors, 2)))
        if not ranks:
            return norms
        squares = norms.square()
        for group in ranks:
            torch.distributed.all_reduce(squares, group=group)
        return squares.sqrt()

    return Operations(
        norm=norm,
        sqrt=lambda array: TensorList(torch._foreach_sqrt(array.tensors)),
        expm1=torch.expm1,
        where=torch.where,
    )


class TorchRuleOptimizer(torch.optim.Optimizer):
    """A PyTorch optimizer with an update rule of :mod:`hpctrain.common.optim.rules`.

    Args:
        groups: groups of parameters in float32 or float64, each with its ``kind``; their gradients are dense.
        settings: any optimizer but adam and adamw.
    """

    def __init__(self, groups: list[dict[str, Any]], settings: Optimizer) -> None:
        defaults: dict[str, Any] = {"lr": settings.learning_rate}
        if settings.transition:
            defaults["sgd_share"] = 1.0
        super().__init__(groups, defaults)
        self._settings, self._names = settings, settings.rule.slots(settings)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        for group in self.param_groups:
            for parameters in _together(each for each in group["params"] if each.grad is not None):
                self._update(group, parameters)

    def _update(self, group: dict[str, Any], parameters: Tensors) -> None:
        """Update parameters of a group that are on one device, of one type, and divided over the same ranks."""
        rule = Rule(settings=self._settings, kind=group["kind"], ops=_operations(_ranks(parameters[0])))
        w = [local_tensor(parameter) for parameter in parameters]
        slots = {name: [self._slot(parameter, name) for parameter in parameters] for name in self._names}
        change, new = rule.update(
            UpdateStep(rate=group["lr"], sgd_share=group.get("sgd_share", 1.0)),
            TensorList(w),
            TensorList(map(_gradient, parameters)),
            {name: torch.stack(slot) if name in SCALARS else TensorList(slot) for name, slot in slots.items()},
        )
        for name, value in new.items():
            torch._foreach_copy_(slots[name], list(value.unbind()) if name in SCALARS else value.tensors)
        torch._foreach_sub_(w, change.tensors)

    def _slot(self, parameter: torch.Tensor, name: str) -> torch.Tensor:
        """This rank's part of a parameter's state, zero where it is missing, laid out as the parameter is."""
        state: State = self.state[parameter]
        if name in SCALARS:
            if name not in state:
                state[name] = torch.zeros((), dtype=parameter.dtype, device=parameter.device)
            return state[name]
        if name not in state:
            state[name] = torch.zeros_like(parameter)
        value = local_tensor(state[name])
        if value is state[name]:
            # A state that was loaded may be laid out as the parameter was when it was saved.
            value = state[name] = laid_out(value, local_tensor(parameter))
        return value


def _together(parameters: Iterable[torch.Tensor]) -> Iterator[Tensors]:
    """Parameters in lists of which each has one device, one type and one division over ranks."""
    together: Tensors = []
    before, numbers = None, 0
    for parameter in parameters:
        device, ranks = parameter.device, _ranks(parameter)
        # Norms of divided parameters are messages, of which there should be few.
        most = TOGETHER["cpu" if device.type == "cpu" and not ranks else "cuda"]
        key = (device, parameter.dtype, ranks)
        if together and (before != key or numbers + parameter.numel() > most):
            yield together
            together, numbers = [], 0
        together.append(parameter)
        before, numbers = key, numbers + parameter.numel()
    if together:
        yield together


def _ranks(parameter: torch.Tensor) -> list[ProcessGroup]:
    """The groups of ranks over which a parameter's elements are divided."""
    if not is_dtensor(parameter):
        return []
    mesh = parameter.device_mesh
    return [
        mesh.get_group(axis)
        for axis, placement in enumerate(parameter.placements)
        if not placement.is_replicate() and mesh.size(axis) > 1
    ]


def _gradient(parameter: torch.Tensor) -> torch.Tensor:
    """This rank's part of a parameter's gradient, laid out as the parameter is, for which PyTorch has kernels."""
    gradient = parameter.grad
    assert gradient is not None
    if is_dtensor(parameter) and is_dtensor(gradient) and gradient.placements != parameter.placements:
        gradient = gradient.redistribute(placements=parameter.placements)
    return laid_out(local_tensor(gradient), local_tensor(parameter))
