"""Which parameters and which other optimizers an optimizer holds."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

Optimizer = torch.optim.Optimizer
# By the parts that optimizers have where ranks divide an optimizer's state (ZeRO 1): the model's parameters.
_wholes = WeakIdKeyDictionary()


def optimizers_in(optimizer: Optimizer) -> list[Optimizer]:
    """The optimizer, and those that it holds (SAM, Lookahead), from the outside to the inside."""
    found = dict[int, Optimizer]()
    waiting: deque[Any] = deque([optimizer])
    while waiting:
        each = waiting.popleft()
        if isinstance(each, Optimizer) and id(each) not in found:
            found[id(each)] = each
            waiting.extend(vars(each).values())
        elif isinstance(each, list | tuple):
            waiting.extend(value for value in each if isinstance(value, Optimizer))
        elif isinstance(each, dict):
            waiting.extend(value for value in each.values() if isinstance(value, Optimizer))
    return list(found.values())


def parameters_of(optimizer: Optimizer) -> Iterator[torch.nn.Parameter]:
    """The parameters in the optimizer's groups."""
    return (parameter for group in optimizer.param_groups for parameter in group["params"])


def set_whole(part: torch.nn.Parameter, parameter: torch.nn.Parameter) -> None:
    """Record the parameter that a part belongs to."""
    _wholes[part] = parameter


def whole_of(parameter: torch.nn.Parameter) -> torch.nn.Parameter:
    """The model's parameter that an optimizer's parameter is a part of, or that parameter itself."""
    # Looked for only where there are parts: a step asks for each parameter.
    whole: torch.nn.Parameter = _wholes.get(parameter, parameter) if _wholes else parameter
    return whole
