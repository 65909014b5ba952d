"""Changes to a model after ``ht.distribute``: added or replaced layers and parameters, and wrappers.

The gradient of a parameter that was added later would stay a rank's own. PyTorch calls a hook when a module or a
parameter is registered, so no step has to search for them.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

from hpctrain.common.errors import HpctrainError
from hpctrain.worker.adapters.torch.reducer import reducers
from hpctrain.worker.adapters.torch.refusals import refuse_wrapped, wrapper

# All modules of the models that were given to ht.distribute.
_parts: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()
_watching: list[object] = []


def watch_changes(model: torch.nn.Module) -> None:
    """Refuse gradients of layers that are added to the model from now on, and wrappers around it."""
    _parts.update(model.modules())
    if not _watching:
        _watching.append(register_module_module_registration_hook(_module_registered))
        _watching.append(register_module_parameter_registration_hook(_parameter_registered))


def is_reduced(parameter: torch.Tensor) -> bool:
    """Whether a reducer handles a parameter."""
    return any(id(parameter) in reducer.managed for reducer in reducers())


def has_parameter(parameters: Iterable[torch.Tensor]) -> bool:
    """Whether any of the parameters belongs to a model that was given to ``ht.distribute``, or to a part of it."""
    own = {id(parameter) for part in _parts for parameter in part.parameters(recurse=False)}
    return any(id(parameter) in own for parameter in parameters)


def _module_registered(parent: torch.nn.Module, name: str, child: Any) -> None:
    if not isinstance(child, torch.nn.Module):
        return
    if (kind := wrapper(parent)) and any(is_reduced(parameter) for parameter in child.parameters()):
        refuse_wrapped(f"{type(child).__name__} is being wrapped in {kind} after ht.distribute")
    if parent in _parts:
        _parts.update(child.modules())
        for path, parameter in child.named_parameters():
            _refuse_gradient(parent, f"{name}.{path}", parameter)


def _parameter_registered(module: torch.nn.Module, name: str, parameter: Any) -> None:
    if module in _parts and isinstance(parameter, torch.nn.Parameter):
        _refuse_gradient(module, name, parameter)


def _refuse_gradient(module: torch.nn.Module, name: str, parameter: torch.nn.Parameter) -> None:
    """Let the first gradient of a parameter end the backward pass, unless ``ht.distribute`` gets it before."""
    if parameter.requires_grad and parameter.is_leaf and not is_reduced(parameter):
        parameter.register_post_accumulate_grad_hook(functools.partial(_check_reduced, type(module).__name__, name))


def _check_reduced(module: str, name: str, parameter: torch.Tensor) -> None:
    if not is_reduced(parameter):
        raise HpctrainError(
            "HT-parameter-not-distributed",
            "parameter {parameter!r} of {module} is not among those that ht.distribute got: it was added "
            "or replaced since, so its gradient is this rank's own",
            "add or replace layers, and call load_state_dict(…, assign=True), before ht.distribute; or give the model "
            "and its optimizer to ht.distribute again after it",
            exit_code=1,
            parameter=name,
            module=module,
        )
