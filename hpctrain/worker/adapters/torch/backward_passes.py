"""Runs an action at the end of each backward pass through a divided model, and notices passes that never ended.

Reentrant activation checkpointing computes the gradients of a part in a backward pass of its own, within the one that
reached that part. In the inner pass, autograd gives a hook no sign of the outer one.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from hpctrain.common.errors import HpctrainError


class BackwardPasses:
    """Backward passes through given parameters. One within another, such as a reentrant checkpoint's, is part of it.

    ``at_end`` is called when all gradients of a pass are made. Begins are seen from ``derivatives.watch_engine`` on.
    """

    def __init__(self, at_end: Callable[[], None] = lambda: None) -> None:
        self._at_end = at_end
        # Not 0, because a pass of which a script calls the engine by itself is not reported.
        self._begun = 1
        # The number of the pass that reached the parameters and has not ended.
        self._running = 0
        # Whether it has made a gradient: a pass through other models has not, although a pass within it was joined.
        self._made = False
        _engine.watched.add(self)

    def begin(self) -> None:
        """Count a new pass; one within another joins the outer pass, which still needs the parameters at its end."""
        if in_backward():
            self._join()
        else:
            self._begun += 1

    def reached(self) -> bool:
        """Ask autograd, at a pass's first gradient, to call back at its end. Returns whether this was the first."""
        self._made = True
        return self._join()

    def made(self) -> bool:
        """Like :meth:`reached`, and refuses a gradient after a pass that an error ended."""
        self.check_ended()
        return self.reached()

    def _join(self) -> bool:
        if self._running == self._begun or not in_backward():
            return False
        self._running = self._begun
        torch.autograd.Variable._execution_engine.queue_callback(self._ended)
        return True

    def _ended(self) -> None:
        made, self._made = self._made, False
        if made:
            self._at_end()
        self._running = 0

    def check_ended(self) -> None:
        """Raise HpctrainError after a pass that an error ended, whose gradients are neither reduced nor dropped."""
        if self._running and not (in_backward() and self._running == self._begun):
            refuse_ended()


def watch_gradients(parameters: Iterable[torch.nn.Parameter], at_gradient: Callable[[], Any]) -> None:
    """Call ``at_gradient`` at each gradient of these parameters."""

    def made(_: torch.Tensor) -> None:
        at_gradient()

    for each in parameters:
        if each.requires_grad:
            each.register_post_accumulate_grad_hook(made)


class _Engine:
    """What PyTorch's engine is called for: ``asked`` if it is ``torch.autograd.grad`` alone."""

    def __init__(self) -> None:
        self.watched: weakref.WeakSet[BackwardPasses] = weakref.WeakSet()
        self.asked = False


_engine = _Engine()


def backward_begins() -> None:
    """Count a backward pass that is about to begin."""
    for each in list(_engine.watched):
        each.begin()


@contextlib.contextmanager
def asking() -> Iterator[None]:
    """A context manager around ``torch.autograd.grad``; one within a backward pass is part of that."""
    before = _engine.asked
    _engine.asked = before or not in_backward()
    try:
        yield
    finally:
        _engine.asked = before


def is_asking() -> bool:
    """Whether gradients are computed for ``torch.autograd.grad`` alone, so that parameters keep theirs."""
    return _engine.asked


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
