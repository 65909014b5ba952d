"""Warns when an optimizer's step changes nothing, although the gradients are not zero.

An optimizer that keeps references of its own may update parameters that the model no longer uses, and training has no
effect. Each optimizer's first steps show that.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterable
from typing import Any

import torch

from hpctrain.worker.adapters.torch.references import parameters_of
from hpctrain.worker.comm import Communicator

# The first ones may change nothing: learning rates may begin at zero, and a GradScaler skips steps that overflow.
_MOST_STEPS = 20

_watched: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()


def watch_first_steps(comm: Communicator, optimizers: Iterable[torch.optim.Optimizer]) -> None:
    """Look at each optimizer's steps until one of them has changed a parameter, or should have."""
    for each in optimizers:
        if each not in _watched:
            _watched.add(each)
            _FirstSteps(comm, each)


class _FirstSteps:
    def __init__(self, comm: Communicator, optimizer: torch.optim.Optimizer) -> None:
        self._comm = comm
        self._before: list[tuple[float, float]] = []
        self._left = _MOST_STEPS
        self._hooks = [optimizer.register_step_pre_hook(self._begin), optimizer.register_step_post_hook(self._end)]

    def _begin(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if not torch.compiler.is_compiling():
            self._before = [_digest(each) for each in parameters_of(optimizer)]

    def _end(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if torch.compiler.is_compiling():
            return
        parameters = [*parameters_of(optimizer)]
        changed = [_digest(each) for each in parameters] != self._before
        self._left -= 1
        should = not changed and _learns(optimizer) and any(map(_has_gradient, parameters))
        if should:
            self._comm.say(
                f"a step of {type(optimizer).__name__} changed none of its {len(parameters)} parameters, whose "
                "gradients are not zero: does it update others, as one that keeps a list of its own does? Make the "
                "optimizer for this model, before ht.distribute"
            )
        if changed or should or not self._left:
            for hook in self._hooks:
                hook.remove()


def _learns(optimizer: torch.optim.Optimizer) -> bool:
    return any(float(group.get("lr", 1)) != 0 for group in optimizer.param_groups)


def _own(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of it."""
    own = tensor.detach()
    return own.to_local() if hasattr(own, "to_local") else own


def _digest(parameter: torch.Tensor) -> tuple[float, float]:
    """Two numbers that an update changes. Copies of all parameters might not fit into memory."""
    own = _own(parameter)
    own = torch.view_as_real(own) if own.is_complex() else own
    return float(own.sum(dtype=torch.float64)), float(torch.linalg.vector_norm(own, dtype=torch.float64))


def _has_gradient(parameter: torch.Tensor) -> bool:
    if parameter.grad is None:
        return False
    gradient = _own(parameter.grad)
    gradient = gradient.coalesce().values() if gradient.is_sparse else gradient
    size = float(gradient.abs().sum(dtype=torch.float64))
    return math.isfinite(size) and size > 0
