"""Copies of a divided model, which are whole, and averages of its parameters over steps."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from typing import Any, NamedTuple, NoReturn

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.optim.swa_utils import AveragedModel

from hpctrain.common.errors import HpctrainError

# An attribute of the module, since what a script put into one may hold the model, and nothing else is to keep it alive.
_FORM = "_hpctrain_form"
_MODULE = frozenset((*vars(nn.Module()), "_compiled_call_impl", _FORM))
_WHOLE_MODEL = "plan=ht.ParallelPlan(zero=1) keeps the model whole"
_update = AveragedModel.update_parameters


class _Form(NamedTuple):
    """A copy of a module from before it was divided, without memory, and the attributes that dividing it has added."""

    module: nn.Module
    added: frozenset[str]


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
        for module, before in zip(model.modules(), form.modules(), strict=True):
            added = frozenset(vars(module)) - frozenset(vars(before))
            vars(module)[_FORM] = _Form(before, added | _MODULE)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            type(module).__deepcopy__ = _copied  # type: ignore[attr-defined]
            type(module).__reduce_ex__ = _refuse_to_pickle  # type: ignore[assignment, method-assign]
    AveragedModel.update_parameters = _averaged  # type: ignore[assignment, method-assign]


def _copied(module: nn.Module, memo: dict[int, Any]) -> nn.Module:
    """A whole copy of a divided module, on every rank, without hooks that were registered since. Collective."""
    form: _Form | None = vars(module).get(_FORM)
    names = [name for name, _ in module.named_modules()]
    if form is None or names != [name for name, _ in form.module.named_modules()]:
        _refuse(module, "copied: it could not be before, or has other layers now", _WHOLE_MODEL)
    found = copy.deepcopy(form.module)
    pairs = list(zip(module.modules(), found.modules(), strict=True))
    # What an attribute holds of the model is that of the copy, and tensors with several names stay one.
    memo |= {id(own): part for own, part in pairs}
    for own, part in pairs:
        for name, tensor in own._parameters.items():
            if tensor is not None and id(tensor) not in memo:
                memo[id(tensor)] = nn.Parameter(_whole(tensor).clone(), tensor.requires_grad)
            part._parameters[name] = None if tensor is None else memo[id(tensor)]
        for name, buffer in own._buffers.items():
            if buffer is not None and id(buffer) not in memo:
                memo[id(buffer)] = buffer.detach().clone()
            part._buffers[name] = None if buffer is None else memo[id(buffer)]
    for own, part in pairs:
        part.training = own.training
        added = vars(own)[_FORM].added
        vars(part).update({name: copy.deepcopy(each, memo) for name, each in vars(own).items() if name not in added})
    return found


def _refuse_to_pickle(module: nn.Module, _: Any) -> NoReturn:
    _refuse(module, "pickled", "copy.deepcopy(model) on all ranks makes a whole one, which torch.save can save")


def _refuse(module: nn.Module, what: str, hint: str) -> NoReturn:
    raise HpctrainError(
        "HT-model-divided",
        "{model} is divided over the ranks and cannot be {what}",
        hint,
        exit_code=1,
        model=type(module).__name__.removeprefix("FSDP"),
        what=what,
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
