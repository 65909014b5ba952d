"""Watches every optimizer's updates, and refuses parameters whose gradients are not the mean over the ranks."""

from __future__ import annotations

import functools
import gc
import itertools
import sys
import weakref
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from hpctrain.common.errors import HpctrainError
from hpctrain.worker.adapters.guard import Guard
from hpctrain.worker.adapters.torch.backward_passes import refuse_ended
from hpctrain.worker.adapters.torch.changes import has_parameter
from hpctrain.worker.adapters.torch.closures import has_closure, mean_loss, with_closure
from hpctrain.worker.adapters.torch.denominators import denominators_of
from hpctrain.worker.adapters.torch.reducer import GradientReducer, reducers
from hpctrain.worker.adapters.torch.references import optimizers_in, parameters_of, whole_of
from hpctrain.worker.adapters.torch.refusals import check_optimizer
from hpctrain.worker.adapters.torch.turns import turns_of
from hpctrain.worker.comm import Communicator

Optimizer = torch.optim.Optimizer
Parameter = torch.nn.Parameter


class Trained:
    """The record of a model that was given to ``ht.distribute``. It lives as long as the model or its trained parts.

    Attributes:
        number: its place among all records, the same on every rank.
        guard: compares its parameters between the ranks.
        note: records a step in the run's events; None where nothing is recorded.
    """

    def __init__(self, comm: Communicator) -> None:
        self.comm = comm
        self.number = next(_numbers)
        self.guard: Guard | None = None
        self.note: Callable[[Optimizer], None] | None = None
        self._optimizers: list[weakref.ref[Optimizer]] = []
        self._sealing: weakref.finalize[..., Trained] | None = None
        self._leader: weakref.ref[Optimizer] | None = None
        self._first: weakref.ref[Parameter] | None = None

    @property
    def optimizers(self) -> list[Optimizer]:
        """The optimizers that the model was distributed with, in order."""
        return [optimizer for reference in self._optimizers if (optimizer := reference()) is not None]

    def add(self, optimizers: Iterable[Optimizer]) -> None:
        """Add optimizers that the model was distributed with."""
        known = self.optimizers
        new = [each for each in optimizers if not any(each is one for one in known)]
        self._optimizers += map(weakref.ref, new)
        for each in new:
            within_others.update(optimizers_in(each)[1:])

    def keep(self, reducer: GradientReducer) -> None:
        """Stay alive as long as the reducer: the model may be a container that is dropped before its parts."""
        _by_reducer[reducer] = self

    def prove(self, guard: Guard) -> None:
        """Replace the guard."""
        if self._sealing is not None:
            self._sealing.detach()
        # A model that is dropped before the end leaves the checksums that prove its parameters equal.
        self.guard, self._sealing = guard, weakref.finalize(self, guard.release)
        self._sealing.atexit = False

    def lead(self, optimizer: Optimizer, model: torch.nn.Module) -> None:
        """Count this optimizer's steps as those of the model, and the steps of any that replaces it."""
        self._leader = weakref.ref(optimizer)
        updated = {id(parameter) for parameter in _parameters(optimizer)}
        first = next((parameter for parameter in model.parameters() if id(parameter) in updated), None)
        self._first = None if first is None else weakref.ref(first)

    def is_led_by(self, optimizer: Optimizer) -> bool:
        """Whether a step of this optimizer counts as one of the model."""
        if self._leader is not None and self._leader() is optimizer:
            return True
        first = self._first and self._first()
        return first is not None and any(parameter is first for parameter in _parameters(optimizer))


_numbers = itertools.count()
trained: weakref.WeakKeyDictionary[torch.nn.Module, Trained] = weakref.WeakKeyDictionary()
_by_reducer: weakref.WeakKeyDictionary[GradientReducer, Trained] = weakref.WeakKeyDictionary()
# Optimizers of models whose gradients FSDP2 or a pipeline reduces.
reduced_elsewhere: weakref.WeakSet[Optimizer] = weakref.WeakSet()
# Optimizers that other optimizers hold: their steps are made within those of the outer one.
within_others: weakref.WeakSet[Optimizer] = weakref.WeakSet()
# The optimizer whose step is running, around any steps of optimizers within it.
_outermost: list[Optimizer] = []
_warned: weakref.WeakSet[Optimizer] = weakref.WeakSet()
_checked: weakref.WeakSet[Optimizer] = weakref.WeakSet()
_watching: list[object] = []


def watch_steps() -> None:
    """Watch every optimizer's steps from now on. Idempotent."""
    if not _watching:
        _watching.append(register_optimizer_step_pre_hook(_before_step))
        _watching.append(register_optimizer_step_post_hook(_after_step))


def _before_step(optimizer: Optimizer, arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
    """Refuse gradients that are this rank's alone.

    Returns:
        The arguments with closures whose loss is the mean over all ranks; None where they stay.

    Raises:
        HpctrainError: a parameter that no call of ``distribute`` saw, a backward pass that did not reach its end, a
            GradScaler where gradients are deferred, or losses that ranks divide by different counts.
    """
    everyone = reducers()
    if not everyone or optimizer in reduced_elsewhere or torch.compiler.is_compiling():
        return None
    if not (nested := optimizer in within_others and bool(_outermost)):
        _outermost[:] = [optimizer]
    _check_ended(everyone)
    reduced = _reduced(everyone)
    _refuse_scaled(optimizer, everyone)
    closure = has_closure(arguments, named)
    own, updates_reduced = [], False
    for parameter in _parameters(optimizer):
        if id(parameter) in reduced:
            updates_reduced = True
        elif parameter.grad is not None or (closure and parameter.requires_grad):
            own.append(parameter)
    if updates_reduced and optimizer not in _checked:
        check_optimizer(optimizer)
        _mention_hooks(optimizer)
        _checked.add(optimizer)
    if own:
        _check_unreduced(optimizer, own, updates_reduced=updates_reduced)
    if not nested and (updates_reduced or _is_given(optimizer)):
        _compare_losses(optimizer, everyone)
    if not closure or not updates_reduced or nested or (comm := _records()[0].comm).size == 1:
        return None
    return with_closure(arguments, named, functools.partial(mean_loss, comm))


def _mention_hooks(optimizer: Optimizer) -> None:
    """Say, once, that the script's hooks on gradients get those of a rank's own samples."""
    comm = _records()[0].comm
    if comm.size == 1:
        return
    for each in _parameters(optimizer):
        hooks = (*(each._backward_hooks or {}).values(), *(each._post_accumulate_grad_hooks or {}).values())
        if any(not str(getattr(hook, "__module__", "")).startswith("hpctrain.") for hook in hooks):
            comm.say(
                "hooks on gradients (register_hook, register_post_accumulate_grad_hook) get those of each rank's own "
                "samples: what scales them or sets some to zero gives the numbers of one process; clamp, clip or "
                "normalise them after backward() instead"
            )
            return


def _refuse_scaled(optimizer: Optimizer, everyone: Iterable[GradientReducer]) -> None:
    deferred = _reduced(reducer for reducer in everyone if reducer.defers)
    if deferred and any(id(parameter) in deferred for parameter in _parameters(optimizer)) and _is_scaled():
        raise HpctrainError(
            "HT-compression-with-loss-scale",
            "compression='top_k' keeps gradients for later steps, where a GradScaler scales differently",
            "autocast in bfloat16 needs none; or choose compression 'bf16'",
            exit_code=1,
        )


def _compare_losses(optimizer: Optimizer, everyone: Iterable[GradientReducer]) -> None:
    several = [each for each in everyone if each.comm.size > 1]
    if not several:
        return
    own = {id(parameter): parameter.device for parameter in _parameters(optimizer)}
    # Only the communicators of this optimizer's models compare, in the same order on all ranks.
    mine = (each for each in several if not each.managed.isdisjoint(own))
    for comm in dict.fromkeys(each.comm for each in sorted(mine, key=lambda each: each.number)):
        denominators_of(comm).step_begins(next(iter(own.values())))


def _check_unreduced(optimizer: Optimizer, own: list[Parameter], *, updates_reduced: bool) -> None:
    """Refuse, or warn of, an optimizer that updates parameters whose gradients are not reduced."""
    if updates_reduced or _is_given(optimizer) or has_parameter(own):
        raise HpctrainError(
            "HT-gradient-not-reduced",
            "the optimizer updates a parameter of shape {shape} whose gradient is not reduced: it "
            "belongs to no model that ht.distribute got, or did not require a gradient then, or was "
            "replaced since",
            "give ht.distribute every model that the optimizer updates, with all its trainable layers unfrozen",
            exit_code=1,
            shape=tuple(own[0].shape),
        )
    comm = _records()[0].comm
    if optimizer in _warned or comm.size == 1:
        return
    _warned.add(optimizer)
    if not _is_reduced_by_others(optimizer, own):
        comm.say(
            f"{type(optimizer).__name__} updates {len(own)} parameters of no model that ht.distribute got: each rank "
            "trains its own copy of them, and the copies drift apart"
        )


def _is_reduced_by_others(optimizer: Optimizer, own: list[Parameter]) -> bool:
    """Whether Horovod, PyTorch's DistributedDataParallel or FSDP2 reduces them. Slow: it searches all objects."""
    if type(optimizer).__module__.startswith("horovod.") or any(hasattr(each, "full_tensor") for each in own):
        return True
    kind = torch.nn.parallel.DistributedDataParallel
    wrappers = (each for each in gc.get_objects() if issubclass(type(each), kind))
    reduced = {id(parameter) for each in wrappers for parameter in each.parameters()}
    return all(id(parameter) in reduced for parameter in own)


def _is_given(optimizer: Optimizer) -> bool:
    """Whether the optimizer was given to ``ht.distribute``."""
    return any(optimizer is one for each in (*_records(), *trained.values()) for one in each.optimizers)


def _is_scaled() -> bool:
    """Whether a GradScaler makes the step."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code is torch.amp.GradScaler.step.__code__:
            return bool(frame.f_locals["self"].is_enabled())
        frame = frame.f_back
    return False


def _check_ended(everyone: Iterable[GradientReducer]) -> None:
    if not any(reducer.interrupted for reducer in everyone):
        return
    if torch._C._current_graph_task_id() != -1:
        raise HpctrainError(
            "HT-optimizer-step-in-backward",
            "optimizer.step() within backward(): the gradients are not reduced yet",
            "step after backward(), not in a hook of it",
            exit_code=1,
        )
    refuse_ended()


def _after_step(optimizer: Optimizer, *_: object) -> None:
    if torch.compiler.is_compiling() or (_outermost and _outermost[0] is not optimizer):
        return
    _outermost.clear()
    for each in _records():
        if not each.is_led_by(optimizer):
            if each.guard is not None and any(optimizer is one for one in each.optimizers):
                each.guard.updated()
            continue
        if each.note is not None:
            each.note(optimizer)
        if each.guard is not None:
            # Ranks that have finished their batches make no steps, and so take part in no check.
            each.guard.step_done(together=turns_of(each.comm).active == each.comm.size)


def _records() -> list[Trained]:
    """The records of all models whose gradients are reduced, in the same order on every rank."""
    return sorted(set(_by_reducer.values()), key=lambda each: each.number)


def _parameters(optimizer: Optimizer) -> Iterable[Parameter]:
    """The model's parameters that an optimizer updates, where it has only parts of them too."""
    return map(whole_of, parameters_of(optimizer))


def _reduced(everyone: Iterable[GradientReducer]) -> set[int]:
    return set[int]().union(*(reducer.managed for reducer in everyone))
