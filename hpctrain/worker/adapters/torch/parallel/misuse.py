"""Says what to write instead, where PyTorch's parts of a divided model end a script with a message of their own."""

from __future__ import annotations

import sys
from types import TracebackType
from typing import Any, NoReturn

from torch import nn
from torch.distributed.fsdp import FSDPModule

from hpctrain.common.errors import HpctrainError

_hooked: list[object] = []


def explain_divided_tensors() -> None:
    """From now on, an uncaught error about a divided tensor says what to write. Idempotent.

    PyTorch 2.13 raises it in C++, where nothing of Python's can be put in its place.
    """
    if _hooked:
        return
    show = sys.excepthook
    _hooked.append(show)

    def explain(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if explained := of_divided_tensors(error):
            print(f"hpctrain: {explained}", file=sys.stderr)
        show(kind, error, trace)

    sys.excepthook = explain


def of_divided_tensors(error: BaseException) -> str:
    """What PyTorch's message about a divided tensor means to a script; nothing for other errors."""
    if "Cannot flatten unevenly sharded tensor" in str(error):
        return (
            "a parameter or gradient that is divided over the ranks, of which they have different numbers of rows, "
            "cannot be flattened: take t.full_tensor() if hasattr(t, 'full_tensor') else t on all ranks before "
            "reshape, view or flatten; plan=ht.ParallelPlan(zero=1) keeps whole parameters and gradients"
        )
    if "appears to not have been used in the graph" in str(error):
        return (
            "the loss was not computed from what torch.autograd.grad differentiates by; if that is a parameter that is "
            "divided over the ranks, it was computed from the gathered one: call backward(), and take p.grad"
        )
    if "mixed torch.Tensor and DTensor" not in str(error):
        return ""
    return (
        "a parameter that is divided over the ranks, or what was computed from it, met a tensor of this rank's own: "
        "call the model or modules in it, which gather their parameters, rather than functions of their weights; in a "
        "penalty, take p.full_tensor() if hasattr(p, 'full_tensor') else p for each p of model.parameters(); "
        "plan=ht.ParallelPlan(zero=1) keeps whole parameters"
    )


def explain_copies(model: nn.Module) -> None:
    """Say what to do instead of a copy of a divided model."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            type(module).__deepcopy__ = _refuse_copy  # type: ignore[attr-defined]


def _refuse_copy(model: nn.Module, _: Any) -> NoReturn:
    raise HpctrainError(
        f"{type(model).__name__.removeprefix('FSDP')} is divided over the ranks and cannot be copied, as copy.deepcopy "
        "and torch.optim.swa_utils.AveragedModel do",
        "average its parameters: averages = [p.detach().clone() for p in model.parameters()], and after each step "
        "average.lerp_(p.detach(), 0.001) for each of them; or plan=ht.ParallelPlan(zero=1), which keeps the model "
        "whole",
        exit_code=1,
    )
