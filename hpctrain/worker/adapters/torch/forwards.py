"""Reports every forward pass to watchers: the module, its arguments and its result.

It uses PyTorch's global hooks, from the first watcher on. Modules have no hooks of their own, so they are pickled and
copied as before, and a wrapper that is put around one later (``torch.compile``, a user's own module) is seen like the
model. Each call of a module then costs 4 microseconds more.
"""

from __future__ import annotations

import threading
import warnings
import weakref
from typing import Any, Protocol

import torch
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from hpctrain.worker.adapters.torch.backward_passes import in_backward


class ForwardWatcher(Protocol):
    """Is notified of each forward pass."""

    def forward_done(self, module: torch.nn.Module, inputs: Any, output: Any) -> None:
        """A module with trainable parameters was called, by no other module, where autograd records."""


class _Depth(threading.local):
    """How many module calls are nested at the moment."""

    value = 0


_watchers: weakref.WeakSet[ForwardWatcher] = weakref.WeakSet()
_depth = _Depth()
_installed = False


def watch_forwards(watcher: ForwardWatcher) -> None:
    """Report every forward pass to ``watcher`` from now on, for as long as it lives."""
    global _installed
    _watchers.add(watcher)
    if not _installed:
        _installed = True
        # The warning says that the hooks run for a compiled model's wrapper too, which is wanted here.
        warnings.filterwarnings("ignore", message="Using `torch.compile.module.` when there are global hooks")
        register_module_forward_pre_hook(_before)
        register_module_forward_hook(_after, with_kwargs=True, always_call=True)


def _before(module: torch.nn.Module, inputs: Any) -> None:
    if not torch.compiler.is_compiling():
        _depth.value += 1


def _after(module: torch.nn.Module, args: Any, kwargs: Any, output: Any = None) -> None:
    # ``output`` has a default because PyTorch omits the keyword arguments where forward() raised.
    if torch.compiler.is_compiling():
        return
    # A compiler may have run one of the two hooks and left out the other.
    _depth.value = max(0, _depth.value - 1)
    if _depth.value or not torch.is_grad_enabled() or in_backward():
        return
    if any(parameter.requires_grad for parameter in module.parameters()):
        for watcher in list(_watchers):
            watcher.forward_done(module, (args, kwargs), output)
