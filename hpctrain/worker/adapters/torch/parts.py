"""Which parameter an optimizer's own parameter is a part of, where ranks divide the optimizer's state (ZeRO 1)."""

from __future__ import annotations

import torch
from torch.utils.weak import WeakIdKeyDictionary

_wholes = WeakIdKeyDictionary()


def set_whole(part: torch.nn.Parameter, parameter: torch.nn.Parameter) -> None:
    """Record which parameter a part is of."""
    _wholes[part] = parameter


def whole_of(parameter: torch.nn.Parameter) -> torch.nn.Parameter:
    """The parameter of the model that an optimizer's is a part of, or is."""
    whole: torch.nn.Parameter = _wholes.get(parameter, parameter)
    return whole
