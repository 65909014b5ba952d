"""Copies of a divided model, which are whole, and averages of its parameters over steps."""

from __future__ import annotations

import contextlib
import copy
import weakref
from collections.abc import Iterator
from typing import Any, NoReturn

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.optim.swa_utils import AveragedModel

from hpctrain.common.errors import HpctrainError

# Of each module of a divided model, a copy from before it was divided, without memory.
_forms: weakref.WeakKeyDictionary[nn.Module, nn.Module] = weakref.WeakKeyDictionary()
_update = AveragedModel.update_parameters


def form_of(model: nn.Module) -> nn.Module | None:
    """A copy of a model that has no memory; None for a model that cannot be copied."""
    tensors = [*model.parameters(), *model.buffers()]
    empty: dict[int, Any] = {id(each): torch.empty_like(each, device="meta") for each in tensors}
    for each in model.parameters():
        empty[id(each)] = nn.Parameter(empty[id(each)], each.requires_grad)
    with contextlib.suppress(Exception):  # whatever a module of the user's own raises
        return copy.deepcopy(model, empty)
    return None


def let_copy(model: nn.Module, form: nn.Module | None) -> None:
    """Let a model that was divided be copied into a whole one, and be averaged by ``AveragedModel``.

    Args:
        form: its copy from before, by :func:`form_of`.
    """
    if form is not None:
        _forms.update(zip(model.modules(), form.modules(), strict=True))
    for module in model.modules():
        if isinstance(module, FSDPModule):
            type(module).__deepcopy__ = _copied  # type: ignore[attr-defined]
            type(module).__reduce_ex__ = _refuse_to_pickle  # type: ignore[assignment, method-assign]
    AveragedModel.update_parameters = _averaged  # type: ignore[assignment, method-assign]


def _copied(module: nn.Module, _: Any) -> nn.Module:
    """A whole copy of a divided module, on every rank. Collective."""
    form = _forms.get(module)
    names = [name for name, _ in module.named_modules()]
    if form is None or names != [name for name, _ in form.named_modules()]:
        raise HpctrainError(
            "HT-model-divided-copy",
            "{model} is divided over the ranks and cannot be copied: it could not be before, or has other layers now",
            "plan=ht.ParallelPlan(zero=1) keeps the model whole",
            exit_code=1,
            model=type(module).__name__.removeprefix("FSDP"),
        )
    found = copy.deepcopy(form)
    made: dict[int, torch.Tensor] = {}  # A tensor may have several names.
    for own, part in zip(module.modules(), found.modules(), strict=True):
        part.training = own.training
        for name, tensor in own._parameters.items():
            if tensor is not None:
                if id(tensor) not in made:
                    made[id(tensor)] = nn.Parameter(_whole(tensor).clone(), tensor.requires_grad)
                part._parameters[name] = made[id(tensor)]  # type: ignore[assignment]
        for name, buffer in own._buffers.items():
            if buffer is not None:
                part._buffers[name] = made.setdefault(id(buffer), buffer.detach().clone())
    return found


def _refuse_to_pickle(module: nn.Module, _: Any) -> NoReturn:
    raise HpctrainError(
        "HT-model-divided-copy",
        "{model} is divided over the ranks and cannot be pickled",
        "copy.deepcopy(model) on all ranks makes a whole one, which torch.save can save",
        exit_code=1,
        model=type(module).__name__.removeprefix("FSDP"),
    )


def _averaged(averaged: AveragedModel, model: nn.Module) -> None:
    """As PyTorch's own, also where one of the two models is divided and the other one is whole."""
    _update(averaged, _Alike(averaged, model))  # type: ignore[arg-type]


class _Alike:
    """A model whose parameters are whole where those of its average are."""

    def __init__(self, averaged: AveragedModel, model: nn.Module) -> None:
        self._averaged, self._model = averaged, model
        self.buffers = model.buffers

    def parameters(self) -> Iterator[torch.Tensor]:
        for own, other in zip(self._averaged.parameters(), self._model.parameters(), strict=False):
            yield other if isinstance(own, DTensor) else _whole(other)


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    whole = tensor.detach()
    return whole.full_tensor() if isinstance(whole, DTensor) else whole
