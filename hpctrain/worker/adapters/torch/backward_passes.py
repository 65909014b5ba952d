"""Notifies watchers when a backward pass begins, and whether it does so within another one.

Reentrant activation checkpointing computes the gradients of a part in a backward pass of its own, within the one that
reached that part. In the inner pass, autograd gives a hook no sign of the outer one.
"""

from __future__ import annotations

import weakref
from typing import Protocol

import torch

from hpctrain.common.errors import HpctrainError


class BackwardWatcher(Protocol):
    """Is notified at the beginning of each backward pass that adds to gradients."""

    def backward_begins(self, *, within: bool) -> None:
        """A backward pass is about to begin.

        Args:
            within: whether another backward pass is running in this thread.
        """


watchers: weakref.WeakSet[BackwardWatcher] = weakref.WeakSet()


def notify_watchers() -> None:
    """Tell all watchers that a backward pass begins."""
    for each in list(watchers):
        each.backward_begins(within=in_backward())


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
