"""The models that ``ht.distribute`` got, and their parameters, which come and go as in one process.

Layers may be added, replaced, parametrized or unfrozen later. PyTorch calls a hook when a module or a parameter is
registered, so that a step only looks at a flag and at the frozen parameters. What is new is taken before the next
forward pass of the model, on all ranks alike.
"""

from __future__ import annotations

import itertools
import operator
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

from hpctrain.common.errors import HpctrainError
from hpctrain.worker.adapters.guard import Guard
from hpctrain.worker.adapters.torch.backward_passes import in_backward
from hpctrain.worker.adapters.torch.broadcast import broadcast_tensors, check_same
from hpctrain.worker.adapters.torch.guarding import guard_over, release, settings_of
from hpctrain.worker.adapters.torch.optimizer_contents import facts_of, optimizers_in, parameters_of, whole_of
from hpctrain.worker.adapters.torch.reducer import GradientReducer, reduced
from hpctrain.worker.adapters.torch.refusals import refuse_wrapped, wrapper
from hpctrain.worker.comm import Communicator

Optimizer = torch.optim.Optimizer
Parameter = torch.nn.Parameter
_requires_grad = operator.attrgetter("requires_grad")


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How a model's gradients are reduced and its parameters guarded, see ``ht.distribute``."""

    bucket_bytes: float
    wire: torch.dtype | None
    guard_every: int


class Trained:
    """The record of a model that was given to ``ht.distribute``. It lives as long as one of the model's modules.

    Attributes:
        reducer: reduces its gradients; None where another record's reducer handles all of them.
        guard: compares its parameters between the ranks.
        optimizers: those that it was distributed with.
        note: records a step in the run's events; None where nothing is recorded.
    """

    def __init__(self, comm: Communicator, model: torch.nn.Module, settings: Settings) -> None:
        self.comm, self.settings = comm, settings
        self.reducer: GradientReducer | None = None
        self.guard: Guard | None = None
        self.note: Callable[[Optimizer], None] | None = None
        self._title = type(model).__name__
        self._model = weakref.ref(model)
        # Those that may be unfrozen.
        self._frozen: list[Parameter] = []
        # The lengths of lists of modules, whose `insert` calls no hook.
        self._lengths: weakref.WeakKeyDictionary[torch.nn.Module, int] = weakref.WeakKeyDictionary()
        self.optimizers: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._sealing: weakref.finalize[..., Trained] | None = None
        self._leader: weakref.ref[Optimizer] | None = None
        self._first: weakref.ref[Parameter] | None = None
        _models[:] = [*(each for each in _models if each() is not None), weakref.ref(self)]

    def add(self, optimizers: Iterable[Optimizer]) -> None:
        """Add optimizers that the model was distributed with."""
        for optimizer in optimizers:
            self.optimizers.add(optimizer)
            for inner in optimizers_in(optimizer)[1:]:
                facts_of(inner).within = True

    @property
    def changed(self) -> bool:
        """Whether parameters were unfrozen, or modules inserted, since the parameters were taken."""
        lengths = self._lengths.items()
        return any(map(_requires_grad, self._frozen)) or any(len(each._modules) != size for each, size in lengths)

    def take(self, *, equal: bool = False) -> bool:
        """Have the reducer take the trainable parameters that none has yet, and guard them. Returns whether it did.

        Collective then. Unless they are ``equal`` on all ranks already, rank 0's are broadcast.
        """
        if self.comm.left:
            self._frozen = []
            self._lengths.clear()
            return False
        modules = dict(self._modules())
        owned = {(number, name): each for number, module in modules.items() for name, each in _parameters_in(module)}
        new = {key: each for key, each in owned.items() if each.requires_grad and id(each) not in reduced}
        if new:
            if self.comm.size > 1 and not equal:
                check_same(
                    self.comm, [(f"{type(modules[key[0]]).__name__}.{key[1]}", each) for key, each in new.items()]
                )
                broadcast_tensors(self.comm, new.values())
                # Garbage collection may have removed replaced modules on some ranks only.
                alive = set[tuple[int, str]].intersection(*self.comm.allgather_object(set(owned)))
                owned = {key: each for key, each in owned.items() if key in alive}
            self._manage(list(dict.fromkeys(owned.values())))
        self._frozen = [each for each in owned.values() if not each.requires_grad and id(each) not in reduced]
        lists = (each for each in modules.values() if isinstance(each, torch.nn.ModuleList | torch.nn.Sequential))
        self._lengths.update({each: len(each._modules) for each in lists})
        return bool(new)

    def _manage(self, parameters: list[Parameter]) -> None:
        names = self._names()
        if self.reducer is None:
            bucket_bytes, wire = self.settings.bucket_bytes, self.settings.wire
            self.reducer = GradientReducer(
                self.comm, self._title, bucket_bytes=bucket_bytes, wire=wire, at_end=_reduce_new_parameters
            )
        known = self.reducer.managed
        own = [each for each in parameters if id(each) in known or (each.requires_grad and id(each) not in reduced)]
        self.reducer.manage([(names(each), each) for each in own])
        if self._first is not None and not any(each is self._first() for each in own):
            self._first = weakref.ref(own[0])
        self._guard([(names(each), each) for each in parameters])

    def _guard(self, parameters: list[tuple[str, Parameter]]) -> None:
        guard = guard_over(self.comm, parameters, every=self.settings.guard_every)
        if self.guard is not None:
            guard.succeed(self.guard)
        if self._sealing is not None:
            self._sealing.detach()
        # A model that is dropped before the end leaves the checksums that prove its parameters equal.
        self.guard, self._sealing = guard, weakref.finalize(self, release, guard)
        self._sealing.atexit = False
        if self._leader is not None and (leader := self._leader()) is not None:
            facts_of(leader).guard = guard

    def _modules(self) -> Iterator[tuple[int, torch.nn.Module]]:
        return ((part.number, module) for module, part in list(_parts.items()) if part.record is self)

    def _names(self) -> Callable[[Parameter], str]:
        """A function that returns a parameter's name in the model, while that lives."""
        model = self._model()
        names = {} if model is None else {id(each): name for name, each in model.named_parameters()}
        return lambda each: names.get(id(each), f"{self._title} {tuple(each.shape)}")

    def lead(self, optimizers: list[Optimizer]) -> None:
        """Count the first optimizer's steps as those of the model, and the steps of any that replaces it."""
        assert self.guard is not None
        self.guard.settings = settings_of(optimizers)
        facts_of(optimizers[0]).guard = self.guard
        self._leader = weakref.ref(optimizers[0])
        updated = {id(parameter) for parameter in updated_by(optimizers[0])}
        parameters = (each for _, module in self._modules() for _, each in _parameters_in(module))
        first = next((each for each in parameters if id(each) in updated), None)
        self._first = None if first is None else weakref.ref(first)

    def is_led_by(self, optimizer: Optimizer) -> bool:
        """Whether a step of this optimizer counts as one of the model."""
        if self._leader is not None and self._leader() is optimizer:
            return True
        first = self._first and self._first()
        return first is not None and any(parameter is first for parameter in updated_by(optimizer))


class Divided:
    """The record of a model that the mesh divides, whose gradients PyTorch reduces.

    Parameters that it gets later would train on each rank alone. They are refused where they are registered, or by the
    next forward pass.
    """

    def __init__(self, comm: Communicator, model: torch.nn.Module) -> None:
        self.comm = comm
        # fully_shard has put its own class before the model's.
        self._title = type(model).__name__.removeprefix("FSDP")
        # No weak references: PyTorch moves divided parameters by swap_tensors, which refuses tensors that have any.
        self._known = {id(parameter): parameter for parameter in model.parameters()}
        model.register_forward_pre_hook(self._before_forward, prepend=True)

    def _before_forward(self, model: torch.nn.Module, _: object) -> None:
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            self.check_all(model.named_parameters())

    def check_all(self, parameters: Iterable[tuple[str, Parameter]]) -> None:
        """Refuse parameters that are trained, unless they are some of those that were divided."""
        for name, parameter in parameters:
            # FSDP2 puts gathered parameters in their place.
            known = id(parameter) in self._known or hasattr(parameter, "_hpctrain_gathered")
            if parameter.requires_grad and not known:
                raise HpctrainError(
                    "HT-model-divided",
                    "{name!r} came to {model} after ht.distribute had divided it, so that no rank's gradients of it "
                    "would be averaged",
                    "add or replace layers, as those of LoRA, before ht.distribute, and copy values into the "
                    "parameters that there are; plan=ht.ParallelPlan(zero=1) takes new ones later too",
                    exit_code=1,
                    name=name,
                    model=self._title,
                )


class _Part(NamedTuple):
    """A module of a model that ``ht.distribute`` got, or that was added to it since; the same number on each rank."""

    record: Trained | Divided
    number: int


_parts: weakref.WeakKeyDictionary[torch.nn.Module, _Part] = weakref.WeakKeyDictionary()
# The records of living models, in the order of ht.distribute's calls.
_models: list[weakref.ref[Trained]] = []
_module_numbers = itertools.count()
# Whether a module or a parameter was registered in a model since parameters were taken.
_registered = threading.Event()
_hooks: list[object] = []


def _living() -> list[Trained]:
    return [record for reference in _models if (record := reference()) is not None]


def records() -> list[Trained]:
    """The records of all living models that have a reducer, in the same order on every rank."""
    return [record for record in _living() if record.reducer is not None]


def record_of(model: torch.nn.Module) -> Trained | None:
    """The record of a model that was given to ``ht.distribute``; None of its parts."""
    part = _parts.get(model)
    return part.record if part and isinstance(part.record, Trained) and part.record._model() is model else None


def ranks_of(module: torch.nn.Module) -> Communicator | None:
    """The ranks that train a module; None of one, such as a copy, that was not given to ``ht.distribute``."""
    part = _parts.get(module)
    return None if part is None else part.record.comm


def reducers_of(model: torch.nn.Module) -> list[GradientReducer]:
    """The reducers of a model's parameters, in the order in which they were made."""
    modules = set(model.modules())
    return [each.reducer for each in records() if each.reducer and any(part in modules for _, part in each._modules())]


def updated_by(optimizer: Optimizer) -> Iterable[Parameter]:
    """The model's parameters that an optimizer updates, where it has only parts of them too."""
    return map(whole_of, parameters_of(optimizer))


def is_reduced(parameter: torch.Tensor) -> bool:
    """Whether a reducer handles a parameter."""
    return id(parameter) in reduced


def is_distributed(module: torch.nn.Module) -> bool:
    """Whether a module belongs to a model that ``ht.distribute`` got, or was added to one since."""
    return module in _parts


def add_modules(model: torch.nn.Module, record: Trained | Divided) -> bool:
    """Record that a module and those within it belong to a model. Returns whether any of them is new."""
    if not _hooks:
        _hooks.append(register_module_module_registration_hook(_module_registered))
        _hooks.append(register_module_parameter_registration_hook(_parameter_registered))
    new = [module for module in model.modules() if module not in _parts]
    _parts.update({module: _Part(record, next(_module_numbers)) for module in new})
    return bool(new)


def take_new_parameters() -> None:
    """Have the gradients of new and unfrozen parameters reduced from now on. Collective if there are any.

    Between a model's forward passes, on all ranks alike.
    """
    if _have_changed() and not in_backward():  # where activation checkpointing repeats a forward pass
        take_changed()


def _have_changed() -> bool:
    return _registered.is_set() or any(record.changed for record in _living())


def _reduce_new_parameters() -> None:
    """Reduce the gradients of parameters that were not taken before the forward pass, as of models called otherwise."""
    # In one order on all ranks: when the last of the models of this backward pass is reduced.
    if _have_changed() and not any(each.reducer.running for each in records() if each.reducer):
        for reducer in take_changed():
            reducer.reduce_present()


def have_any(parameters: set[int]) -> bool:
    """Whether the models have any of these parameters, by their ids. Slow: it looks at all."""
    return any(id(each) in parameters for module in list(_parts) for _, each in _parameters_in(module))


def take_changed() -> list[GradientReducer]:
    """Take the new parameters of all models; returns the reducers that got some. Collective then."""
    _registered.clear()
    for module, part in list(_parts.items()):
        for child in list(module.children()):
            add_modules(child, part.record)
    return [record.reducer for record in _living() if record.take() and record.reducer is not None]


def _parameters_in(module: torch.nn.Module) -> Iterator[tuple[str, Parameter]]:
    # Not what functional_call has put into the place of parameters.
    return ((name, each) for name, each in module._parameters.items() if isinstance(each, Parameter) and each.is_leaf)


def _module_registered(parent: torch.nn.Module, name: str, child: Any) -> None:
    if not isinstance(child, torch.nn.Module):
        return
    if kind := wrapper(parent):
        known = [part.record for each in child.modules() if (part := _parts.get(each))]
        if any(isinstance(record, Trained) and record.comm.size > 1 for record in known):
            refuse_wrapped(f"{type(child).__name__} is being wrapped in {kind} after ht.distribute")
    part = _parts.get(parent)
    if part is None:
        return
    if isinstance(part.record, Divided):
        part.record.check_all((f"{name}.{inner}", each) for inner, each in child.named_parameters())
    if add_modules(child, part.record):
        _registered.set()


def _parameter_registered(module: torch.nn.Module, name: str, parameter: Any) -> None:
    part = _parts.get(module)
    if part is None or not isinstance(parameter, Parameter) or is_reduced(parameter):
        return
    if isinstance(part.record, Divided):
        part.record.check_all([(f"{type(module).__name__}.{name}", parameter)])
    else:
        _registered.set()
