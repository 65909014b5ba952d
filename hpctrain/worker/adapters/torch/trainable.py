"""The parameters whose gradients a reducer averages."""

from __future__ import annotations

import torch

from hpctrain.worker.adapters.torch.reducer import reducers


def is_reduced(parameter: torch.Tensor) -> bool:
    """Whether a reducer averages a parameter's gradients."""
    return any(id(parameter) in reducer.managed for reducer in reducers())


def is_distributed(module: torch.nn.Module) -> bool:
    """Whether a module belongs to a model that ``ht.distribute`` got."""
    return any(is_reduced(parameter) for parameter in module.parameters())


def take_new_parameters() -> None:
    """Have the gradients of new parameters reduced."""
