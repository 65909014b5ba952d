"""Warns when a model is used with running statistics of one rank's samples alone."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import nn

from hpctrain.common.errors import HpctrainError
from hpctrain.worker.comm.base import Communicator
from hpctrain.worker.models import torch_batch_norm

# Models that were trained since their statistics were averaged.
_own: weakref.WeakSet[nn.Module] = weakref.WeakSet()


def average_statistics(model: nn.Module, comm: Communicator) -> None:
    """Average the running statistics over the ranks, so that no warning is due. Collective."""
    _own.discard(model)
    torch_batch_norm.average_statistics(model, comm)


def warn_of_own_statistics(model: nn.Module, warn: Callable[[], None]) -> None:
    """Call ``warn`` once when a model is evaluated or saved with statistics of this rank's samples alone.

    It averages nothing, because this rank cannot know whether the others evaluate or save too. It cannot see the steps
    of a model that torch.jit.script has compiled either, and calls ``warn`` at once for one.
    """
    norms = (module for module in model.modules() if isinstance(getattr(module, "running_mean", None), torch.Tensor))
    norm = next((module for module in norms if not isinstance(module, nn.SyncBatchNorm)), None)
    if isinstance(norm, torch.jit.ScriptModule):
        warn()
    elif norm is not None:
        watch = _Watch(model, warn)
        norm.register_forward_pre_hook(_Hook(watch.before_forward))
        model.register_state_dict_pre_hook(_Hook(watch.before_saving))


class _Hook:
    """A hook that does nothing in a copy or in a saved model, which loads without hpctrain."""

    def __init__(self, call: Callable[..., None]) -> None:
        self._call = call

    def __call__(self, *arguments: object) -> None:
        self._call(*arguments)

    def __deepcopy__(self, memo: dict[int, Any]) -> _Hook:
        return _Hook(_nothing)

    def __reduce__(self) -> tuple[Any, tuple[object, str]]:
        # Loads as a function of the standard library that takes any arguments and returns None.
        return getattr, (contextlib.nullcontext(), "__exit__")

    @property
    def __name__(self) -> NoReturn:
        # Only torch.jit.script reads the name, in order to compile the hook.
        raise HpctrainError(
            "HT-model-not-scriptable",
            "torch.jit.script cannot compile a model with batch normalisation after ht.distribute, or a copy of it",
            "call ht.distribute with the compiled model, use torch.jit.trace or torch.compile, or load the "
            "model's state_dict() into a new model and compile that",
            exit_code=1,
        )


def _nothing(*_: object) -> None:
    pass


class _Watch:
    """Tracks whether a model was trained and then used without its statistics being averaged."""

    def __init__(self, model: nn.Module, warn: Callable[[], None]) -> None:
        self._model = weakref.ref(model)
        self._warn: Callable[[], None] | None = warn

    def before_forward(self, module: nn.Module, _: object) -> None:
        # While compiling, the hook would become a part of the graph.
        if self._warn is None or torch.compiler.is_compiling():
            return
        if not module.training:
            self.before_saving()
        elif model := self._model():
            _own.add(model)

    def before_saving(self, *_: object) -> None:
        model = self._model()
        if self._warn and model in _own:
            warn, self._warn = self._warn, None
            warn()
