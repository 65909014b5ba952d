"""Makes a recipe's optimizer in PyTorch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from hpctrain.common.optim import rules
from hpctrain.common.optim.rules import ParameterKind
from hpctrain.common.recipes.optimizers import Optimizer
from hpctrain.worker.train.torch_finetuning import rate_factors
from hpctrain.worker.train.torch_updates import TorchRuleOptimizer

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
        case "sgd" if not (settings.decoupled_decay or settings.rate_in_momentum):
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
    for gradient in gradients:
        gradient.mul_(scale.to(gradient.device))


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
