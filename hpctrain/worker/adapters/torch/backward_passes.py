"""Notifies watchers when a backward pass begins, and whether it does so within another one.

Reentrant activation checkpointing computes the gradients of a part in a backward pass of its own, within the one that
reached that part. In the inner pass, autograd gives a hook no sign of the outer one.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import is_tensor
from torch.autograd.graph import GradientEdge

from hpctrain.common.errors import HpctrainError


class BackwardWatcher(Protocol):
    """Is notified at the beginning of each call of ``torch.autograd.backward``."""

    def backward_begins(self, roots: Sequence[torch.Tensor], *, trains: bool, within: bool) -> None:
        """A backward pass is about to begin.

        Args:
            roots: the tensors that it begins at, such as the loss. Edges of the graph are left out.
            trains: False if its gradients are for given inputs alone, as those of adversarial examples are.
            within: whether another backward pass is running in this thread.
        """


_watchers: weakref.WeakSet[BackwardWatcher] = weakref.WeakSet()
_installed: list[object] = []


def watch_backward(watcher: BackwardWatcher) -> None:
    """Notify ``watcher`` of every backward pass from now on, for as long as it lives."""
    _watchers.add(watcher)
    if _installed:
        return
    backward = torch.autograd.backward
    _installed.append(backward)

    # Replaced because only the loss leads to its graph, and no hook of PyTorch's gets the loss.
    @functools.wraps(backward)
    def watched(tensors: Any, *arguments: Any, **settings: Any) -> None:
        if not torch.compiler.is_compiling():
            if not isinstance(tensors, torch.Tensor | GradientEdge):
                tensors = tuple(tensors)  # an iterator can be read only once
            # A GradientEdge is a tuple of its own parts, of which none is a tensor.
            roots = [tensors] if isinstance(tensors, torch.Tensor) else [each for each in tensors if is_tensor(each)]
            for each in list(_watchers):
                each.backward_begins(roots, trains=settings.get("inputs") is None, within=in_backward())
        backward(tensors, *arguments, **settings)

    torch.autograd.backward = watched


def in_backward() -> bool:
    """Whether a backward pass is running in this thread, as when activation checkpointing repeats a forward pass."""
    return bool(torch._C._current_graph_task_id() != -1)


def refuse_ended() -> None:
    """Raise HpctrainError for a backward pass that an error ended."""
    raise HpctrainError(
        "HT-backward-ended-early",
        "an error ended a backward pass before its gradients were reduced, so the ranks no longer agree",
        "let an error in backward() end the run",
        exit_code=1,
    )
