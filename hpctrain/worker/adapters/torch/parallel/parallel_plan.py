"""What a user says about how a model is divided over the ranks."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Literal

import torch
from torch import nn
from torch.distributed.tensor.parallel import ParallelStyle

from hpctrain.common.errors import HpctrainError, nearest

Modules = Sequence[type[nn.Module] | str] | type[nn.Module] | str


@dataclass(frozen=True, kw_only=True)
class ParallelPlan:
    """How ``ht.distribute`` divides a model over the mesh.

    Modules are given by their class, the name of their class, or their name in the model, in which ``*`` stands for
    any part (``"blocks.*"``); one alone needs no list.

    Attributes:
        shard: modules whose parameters are gathered and freed together (FSDP2's ``fully_shard``), usually the blocks;
            parameters in none of them are gathered with the whole model.
        tensor: how modules are divided over tp, by name: objects of torch.distributed.tensor.parallel. Parameters that
            it does not name are whole on every rank.
        recompute: modules whose activations are recomputed in the backward pass instead of being kept.
        precision: the type of parameters and activations while the model computes, such as torch.bfloat16; gradients
            are then reduced in float32, and the optimizer's parameters keep their own type.
        zero: along dp_shard, 3 divides parameters, gradients and the optimizer's state, 2 keeps the whole parameters
            from the forward to the backward pass, 1 divides the optimizer's state only (arXiv 1910.02054); with tp or
            a precision, 1 is 2.
        blocks: the name of the ``nn.ModuleDict`` that is cut into pipeline stages.
    """

    shard: Modules = ()
    tensor: Mapping[str, ParallelStyle] = field(default_factory=dict)
    recompute: Modules = ()
    precision: torch.dtype | None = None
    zero: Literal[1, 2, 3] = 3
    blocks: str = "blocks"

    def __post_init__(self) -> None:
        if self.zero not in (1, 2, 3):
            raise HpctrainError(
                "HT-choice-unknown", "zero={zero!r} is not a stage of ZeRO", "valid: 1, 2, 3", zero=self.zero
            )

    def check(self, model: nn.Module) -> None:
        """Raise HpctrainError where the plan names a module that the model does not have."""
        names_of(model, self.shard, "shard")
        names_of(model, self.recompute, "recompute")
        names_of(model, list(self.tensor), "tensor")


def names_of(model: nn.Module, wanted: Modules, key: str) -> list[str]:
    """The names of the modules that a key of a plan selects, each once, in the model's order."""
    modules = {name: module for name, module in model.named_modules() if name}
    found: set[str] = set()
    for item in _listed(wanted):
        if not (own := present(modules, [item])):
            # Numbered layers are suggested as one pattern.
            known = {re.sub(r"\b[0-9]+\b", "*", name) for name in modules}
            known |= {type(module).__name__ for module in modules.values()}
            raise HpctrainError(
                "HT-parallel-plan-not-valid",
                "{key} of the plan names {module}, which {model} does not have",
                nearest(_text(item), known),
                key=key,
                module=_text(item),
                model=type(model).__name__,
            )
        found.update(own)
    return [name for name in modules if name in found]


def present(modules: Mapping[str, nn.Module], wanted: Modules) -> set[str]:
    """The names of the wanted modules among these. A stage of a pipeline need not have all of them."""
    return {name for name, module in modules.items() for item in _listed(wanted) if _is_meant(name, module, item)}


def _listed(wanted: Modules) -> Sequence[type[nn.Module] | str]:
    return [wanted] if isinstance(wanted, str | type) else wanted


def _is_meant(name: str, module: nn.Module, item: type[nn.Module] | str) -> bool:
    if isinstance(item, type):
        return isinstance(module, item)
    parts, pattern = name.split("."), item.split(".")
    matches = len(parts) == len(pattern) and all(map(fnmatchcase, parts, pattern))
    return matches or item == type(module).__name__


def _text(item: type | str) -> str:
    return item if isinstance(item, str) else item.__name__
