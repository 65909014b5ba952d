"""Makes an optimizer of plain parameters one of their DTensors."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from hpctrain.errors import HpctrainError

# Their fused kernels take DTensors (torch/distributed/tensor/_ops/_pointwise_ops.py of PyTorch 2.13); SGD's does not.
_FUSED = (torch.optim.Adam, torch.optim.AdamW)


class Rewiring:
    """Which parameters of a model some optimizers update, by name; made before the parameters are replaced.

    Raises:
        HpctrainError: an optimizer has a state already, or parameters that the model does not have.
    """

    def __init__(self, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self._optimizers = optimizers
        self._names: dict[int, list[str]] = {}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            self._names.setdefault(id(parameter), []).append(name)
        for optimizer in optimizers:
            _check(optimizer, self._names)

    def apply(self, models: Iterable[nn.Module]) -> None:
        """Give each group the parameters that now have its names, in the same order; those that no model has are left
        out.
        """
        now = {name: each for model in models for name, each in model.named_parameters(remove_duplicate=False)}
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                _replace(
                    group, [[now[name] for name in self._names[id(old)] if name in now] for old in group["params"]]
                )
            if any(isinstance(each, DTensor) for group in optimizer.param_groups for each in group["params"]):
                fuse(optimizer)


def _check(optimizer: torch.optim.Optimizer, known: dict[int, list[str]]) -> None:
    if optimizer.state:
        raise HpctrainError(
            f"{type(optimizer).__name__} has already made steps: its state is that of whole parameters, which are "
            "about to be divided",
            "give ht.distribute a new optimizer, and load a checkpoint after it",
        )
    foreign = next(
        (each for group in optimizer.param_groups for each in group["params"] if id(each) not in known), None
    )
    if foreign is not None:
        raise HpctrainError(
            f"{type(optimizer).__name__} updates a parameter of shape {tuple(foreign.shape)} that the model does not "
            "have",
            "make the optimizer from model.parameters(), after the model's last layer was added or replaced",
        )


def _replace(group: dict[str, Any], parameters: list[list[nn.Parameter]]) -> None:
    unique = [list({id(each): each for each in now}.values()) for now in parameters]
    group["params"] = [each for now in unique for each in now]
    if "param_names" in group:
        group["param_names"] = [name for name, now in zip(group["param_names"], unique, strict=True) for _ in now]


def fuse(optimizer: torch.optim.Optimizer) -> None:
    """Let an optimizer of DTensors use one kernel for all of them; a loop over them spends its time on dispatch."""
    for group in optimizer.param_groups:
        chosen = [group.get(key) for key in ("foreach", "fused", "capturable", "differentiable")]
        if any(chosen) or not all(each.is_floating_point() for each in group["params"]):
            continue
        if type(optimizer) in _FUSED:
            group["fused"], group["foreach"] = True, False
        elif "foreach" in group:
            group["foreach"] = True
