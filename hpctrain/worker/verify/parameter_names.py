"""Names of parameters, alike in each run of a script."""

from __future__ import annotations

import contextlib
import gc
import sys
import weakref
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.utils.weak import WeakTensorKeyDictionary

from hpctrain.common.run.step_records import NAMELESS, RankFacts

# Wrappers of models, whose own names only one of two runs may have.
_WRAPPERS = frozenset(("module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_forward_module"))


class ParameterNames:
    """The name of each parameter in its model, and a number of those that several models have by turns."""

    def __init__(self, facts: RankFacts) -> None:
        self._facts = facts
        # By the tensors themselves: what a script makes later may get the identity of what is gone.
        self._names: Any = WeakTensorKeyDictionary()
        self._places: dict[str, tuple[weakref.ref[Any], str]] = {}

    def of(self, parameters: list[torch.Tensor]) -> Mapping[torch.Tensor, str]:
        """The name of each; of one without a model, its place among them."""
        if any(each not in self._names for each in parameters):
            self._find({id(each): each for each in parameters})
        for place, each in enumerate(parameters):
            self._names.setdefault(each, f"{NAMELESS}{place}")
        names: Mapping[torch.Tensor, str] = self._names
        return names

    def _find(self, wanted: dict[int, torch.Tensor]) -> None:
        objects = gc.get_objects()
        modules = [each for each in objects if _is_module(each)]
        inner = {id(part) for module in modules for part in module.modules() if part is not module}
        outer = [each for each in modules if id(each) not in inner and any(id(p) in wanted for p in each.parameters())]
        pipelines = [each for each in objects if _is_pipeline(each)]
        self._facts.divided |= bool(pipelines)
        # A pipeline knows by which name one process has a parameter that two stages share.
        for owner in [*pipelines, *outer]:
            for name, parameter in owner.named_parameters():
                if id(parameter) in wanted and parameter not in self._names:
                    self._names[parameter] = self._title(owner, name)

    def _title(self, owner: Any, name: str) -> str:
        place, title, number = (weakref.ref(owner), name), short_name(name), 2
        # One place has several parameters by turns under FSDP2: whole ones, and a rank's part.
        while self._places.setdefault(title, place) != place:
            title, number = f"{short_name(name)} ({number})", number + 1
        return title


def short_name(name: str) -> str:
    """A parameter's name without the names of what wraps its model."""
    return ".".join(word for word in name.split(".") if word not in _WRAPPERS)


def _is_module(value: Any) -> bool:
    with contextlib.suppress(Exception):  # objects of every kind, in any state
        return issubclass(type(value), nn.Module)
    return False


def _is_pipeline(value: Any) -> bool:
    module = sys.modules.get("hpctrain.worker.adapters.torch.parallel.pipeline")
    return module is not None and type(value) is module.Pipeline
