"""Watches every optimizer's steps: counts and guards those of distributed models, whose gradients must be reduced."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from hpctrain.common.errors import HpctrainError
from hpctrain.worker.adapters.recording import recording
from hpctrain.worker.adapters.torch.backward_passes import refuse_ended
from hpctrain.worker.adapters.torch.batch.ranks import known_ranks
from hpctrain.worker.adapters.torch.optimizer_contents import facts_of, learning_rate
from hpctrain.worker.adapters.torch.reducer import GradientReducer
from hpctrain.worker.adapters.torch.refusals import check_optimizer
from hpctrain.worker.adapters.torch.trainable import have_any, is_reduced, records, take_changed, updated_by
from hpctrain.worker.comm import Communicator

Optimizer = torch.optim.Optimizer


# The optimizer whose step is running, around any steps of optimizers within it.
_outermost: list[Optimizer] = []
_watching: list[object] = []


def watch_steps() -> None:
    """Watch every optimizer's steps from now on. Idempotent."""
    if not _watching:
        _watching.append(register_optimizer_step_pre_hook(_before_step))
        _watching.append(register_optimizer_step_post_hook(_after_step))


def _before_step(optimizer: Optimizer, arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
    """Refuse gradients that are not reduced yet.

    Returns:
        The arguments with closures whose loss is the mean over all ranks; None where they stay.
    """
    if not (known := records()) or torch.compiler.is_compiling() or (facts := facts_of(optimizer)).reduced_elsewhere:
        return None
    if not (nested := facts.within and bool(_outermost)):
        _outermost[:] = [optimizer]
    # A model may outlive its run, such as one that a compiler keeps.
    several = [each for each in known if each.comm.size > 1 and not each.comm.left]
    if not several:
        return None
    everyone = [each.reducer for each in several if each.reducer is not None]
    _check_ended(everyone)
    _reduce_new(optimizer)
    if not any(map(is_reduced, updated_by(optimizer))):
        return None
    comm = several[0].comm
    if not facts.checked:
        check_optimizer(optimizer)
        facts.checked = True
    return None if nested else with_closure(arguments, named, functools.partial(mean_loss, comm))


def _reduce_new(optimizer: Optimizer) -> None:
    """Reduce the gradients of parameters that a model got since its last forward pass, or where no hook is called."""
    other = {id(each) for each in updated_by(optimizer) if each.requires_grad and not is_reduced(each)}
    facts = facts_of(optimizer)
    if not other <= facts.others:
        for reducer in take_changed() if have_any(other) else ():
            reducer.reduce_present()
        facts.others = other


def _check_ended(everyone: Iterable[GradientReducer]) -> None:
    if not any(reducer.running for reducer in everyone):
        return
    if torch._C._current_graph_task_id() != -1:
        raise HpctrainError(
            "HT-gradients-not-reduced-yet",
            "optimizer.step() within backward(): the gradients are not reduced yet",
            "step after backward(), not in a hook of it",
            exit_code=1,
        )
    refuse_ended()


def _after_step(optimizer: Optimizer, *_: object) -> None:
    if torch.compiler.is_compiling() or (_outermost and _outermost[0] is not optimizer):
        return
    _outermost.clear()
    for each in records():
        if not each.is_led_by(optimizer):
            if each.guard is not None and optimizer in each.optimizers:
                each.guard.updated()
            continue
        if each.note is not None:
            each.note(optimizer)
        if each.guard is not None:
            each.guard.step_done()


Closure = Callable[[], Any]


def with_closure(
    args: tuple[Any, ...], kwargs: dict[str, Any], evaluate: Callable[[Closure], Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """The arguments of a step, the optimizer first, with closures that ``evaluate`` calls; None without a closure."""
    if not any(map(callable, (*args[1:], *kwargs.values()))):
        return None

    def instead(value: Any) -> Any:
        return (lambda: evaluate(value)) if callable(value) else value

    return (args[0], *map(instead, args[1:])), {name: instead(value) for name, value in kwargs.items()}


def mean_loss(comm: Communicator, closure: Closure) -> Any:
    """The mean over the ranks of a closure's loss; the loss of a whole batch is the same on all of them. Collective.

    LBFGS chooses the length and number of its steps by it; ranks that chose differently would wait for each other.
    """
    loss = closure()
    number = loss.item() if isinstance(loss, torch.Tensor) and loss.numel() == 1 else loss
    if not isinstance(number, float):
        return loss
    mean = float(comm.allreduce(np.array([number]))[0])
    return loss.detach().new_full(loss.shape, mean) if isinstance(loss, torch.Tensor) else mean


def step_recorder(
    comm: Communicator, model: torch.nn.Module, bucket_mb: float | None = None
) -> Callable[[Optimizer], None] | None:
    """The function that records a step of a script's first model with its learning rate; None to record nothing."""
    own, parameters = recording(), sum(parameter.numel() for parameter in model.parameters())
    if own is None or not own.begin_run(comm, "torch", model, parameters, bucket_mb):
        return None

    def step_done(optimizer: Optimizer) -> None:
        ranks = known_ranks()
        own.step_done(learning_rate(optimizer), gathered=None if ranks is None else ranks.end_step())

    return step_done
