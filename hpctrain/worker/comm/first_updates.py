"""Notices the first updates that a script makes of what it trains with PyTorch, by an optimizer or by its own hand.

An update is known by its effect. A step without gradients changes nothing, nor does the one by which
torch.distributed.checkpoint makes a state to load into; and ``p -= rate * p.grad`` shows only in a parameter that has
changed from one backward pass to the next, other than by loading a state.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, Any

from hpctrain.worker.comm.after_import import change_after_import

if TYPE_CHECKING:
    import torch

_OPTIMIZERS, _AUTOGRAD, _MODULES = "torch.optim.optimizer", "torch.autograd", "torch.nn.modules.module"
# Integers as wide as a tensor's elements.
_INTEGERS = {1: "int8", 2: "int16", 4: "int32", 8: "int64", 16: "int64"}
# In how many backward passes without an update tensors are searched for. Several losses may take turns.
_SEARCHES = 8


@dataclass(frozen=True)
class _Before:
    """What a tensor's bits added up to at some time; ``total`` is None for one that cannot be compared."""

    tensor: weakref.ref[torch.Tensor]
    total: torch.Tensor | None

    @classmethod
    def of(cls, tensor: torch.Tensor) -> _Before:
        return cls(weakref.ref(tensor), _total(tensor))

    def changed(self, *, unknown: bool) -> bool:
        """Whether the tensor is another by now; ``unknown`` for one that cannot be compared."""
        now = self.tensor()
        if now is None:
            return False
        total = _total(now)
        return unknown if self.total is None or total is None else not self.total.equal(total)


def _total(tensor: torch.Tensor) -> torch.Tensor | None:
    import torch

    # To look into a tensor that is divided over ranks would be a collective call.
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.is_meta:
        return None
    # FSDP frees the memory of what it has gathered, and to read it ends the process.
    if tensor.numel() and not tensor.untyped_storage().nbytes():
        return None
    # Of all elements, as a step may change a few rows of embeddings; it takes about as long as an update by SGD.
    integers = getattr(torch, _INTEGERS[tensor.element_size()])
    return tensor.detach().reshape(-1).view(integers).sum(dtype=integers)


class FirstUpdates:
    """Watches the script's optimizers and backward passes until it has seen some updates.

    Args:
        updated: is called after each of them.
        wanted: how many are watched for; later ones cost nothing.
    """

    def __init__(self, updated: Callable[[], object], wanted: int) -> None:
        self._updated, self._left = updated, wanted
        self._optimized: dict[int, list[_Before]] = {}
        self._leaves: dict[int, _Before] = {}
        self._searches = 0
        change_after_import(
            {
                _OPTIMIZERS: self._watch_optimizers,
                _AUTOGRAD: self._watch_backward,
                _MODULES: self._watch_loading,
            }
        )

    def _update(self) -> None:
        self._left -= 1
        # What an optimizer has changed is no second update at the next backward pass.
        self._leaves.clear()
        self._searches = 0
        self._updated()

    def _watch_optimizers(self, module: ModuleType) -> None:
        def before(optimizer: torch.optim.Optimizer, *_: object) -> None:
            if self._looks():
                with contextlib.suppress(Exception):
                    tensors = (each for group in optimizer.param_groups for each in group["params"])
                    self._optimized[id(optimizer)] = [_Before.of(tensor) for tensor in tensors]

        def after(optimizer: torch.optim.Optimizer, *_: object) -> None:
            with contextlib.suppress(Exception):
                if any(each.changed(unknown=True) for each in self._optimized.pop(id(optimizer), ())):
                    self._update()

        # PyTorch does not let a hook remove itself.
        module.register_optimizer_step_pre_hook(before)
        module.register_optimizer_step_post_hook(after)

    def _watch_backward(self, module: ModuleType) -> None:
        # Both backward() and grad() call it, and unlike these no compiler knows it by its identity.
        run = getattr(module, "_engine_run_backward", None)
        if run is None:
            return

        def watched(outputs: Any, *arguments: Any, **settings: Any) -> Any:
            if self._looks():
                with contextlib.suppress(Exception):
                    self._look_at_leaves(outputs)
            return run(outputs, *arguments, **settings)

        module._engine_run_backward = watched  # type: ignore[attr-defined]

    def _watch_loading(self, module: ModuleType) -> None:
        load = module.Module.load_state_dict

        @functools.wraps(load)
        def loaded(loading: Any, *arguments: Any, **settings: Any) -> Any:
            # An evaluation of several checkpoints may have backward passes too. Others are compared on: a script may
            # load a copy after each update of what it trains.
            if self._left > 0:
                for each in loading.parameters():
                    self._leaves.pop(id(each), None)
                self._searches = 0
            return load(loading, *arguments, **settings)

        module.Module.load_state_dict = loaded

    def _looks(self) -> bool:
        import torch

        # To read a value would end the capture of a CUDA graph.
        return self._left > 0 and not (torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing())

    def _look_at_leaves(self, outputs: Iterable[Any]) -> None:
        if any(each.changed(unknown=False) for each in self._leaves.values()):
            self._update()
        if self._searches < _SEARCHES:
            self._searches += 1
            # An input that is changed along its gradient, as for adversarial samples, is not what is trained.
            found = [leaf for leaf in _leaves(outputs) if id(leaf) not in self._leaves]
            trained = [leaf for leaf in found if _is_parameter(leaf)] or ([] if _any_parameter() else found)
            self._leaves |= {id(leaf): _Before.of(leaf) for leaf in trained}


def _leaves(outputs: Iterable[Any]) -> Iterator[torch.Tensor]:
    """What a backward pass from these outputs computes gradients of."""
    nodes = [getattr(each, "grad_fn", None) or getattr(each, "node", None) for each in outputs]
    seen = set()
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)
        if leaf is not None:
            yield leaf
        nodes += (following for following, _ in node.next_functions)


def _is_parameter(tensor: torch.Tensor) -> bool:
    import torch

    return isinstance(tensor, torch.nn.Parameter)


def _any_parameter() -> bool:
    """Whether the script has a module's parameter at all, rather than tensors that are trained by themselves."""
    import torch

    # isinstance() would ask the objects, of whatever kind they are.
    return any(issubclass(type(each), torch.nn.Parameter) for each in gc.get_objects())
