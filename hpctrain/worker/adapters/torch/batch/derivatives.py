"""Backward passes that begin at batches, and gradients that a script asks autograd for.

``torch.autograd.grad`` has to return the true gradient: for a plain tensor, such as a parameter, the mean over the
ranks. No hook tells its call from that of ``backward()``, after which the reducer averages, and none is called before
either. So the function through which both start PyTorch's engine is replaced.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.overrides import handle_torch_function, has_torch_function

from hpctrain.worker.adapters.torch.backward_passes import asking, backward_begins, in_backward
from hpctrain.worker.adapters.torch.batch.ranks import known_ranks, mean_over_ranks
from hpctrain.worker.adapters.torch.batch.tensor import BatchTensor, on_whole, rows_of, rule, running, whole_of
from hpctrain.worker.adapters.torch.refusals import SINCE_2_13


@rule(torch.Tensor.backward)
def backward(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    given = _given(func, args, kwargs)
    given["grad_tensors"] = given.pop("gradient", None)
    return torch_backward(torch.autograd.backward, (given.pop("self"),), given)


@rule(torch.autograd.backward)
def torch_backward(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    given = _given(func, args, kwargs)
    roots = _listed(given.pop("tensors"))
    gradients = _listed(given.pop("grad_tensors", None)) or [None] * len(roots)
    starts = [_start(root, gradient) for root, gradient in zip(roots, gradients, strict=True)]
    if given.get("inputs") is not None:
        given["inputs"] = [_here(each) for each in _listed(given["inputs"])]
    return func([_here(root) for root in roots], starts, **given)


@rule(torch.autograd.grad)
def grad(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    given = _given(func, args, kwargs)
    roots, inputs = _listed(given.pop("outputs")), _listed(given.pop("inputs"))
    gradients = _listed(given.pop("grad_outputs", None)) or [None] * len(roots)
    if given.get("is_grads_batched"):
        return NotImplemented
    starts = [_start(root, gradient) for root, gradient in zip(roots, gradients, strict=True)]
    batches = [isinstance(each, BatchTensor) for each in inputs]
    running.asks = True  # gradients of rows are not averaged
    try:
        found = func([_here(root) for root in roots], [_here(each) for each in inputs], starts, **given)
    finally:
        running.asks = False
    rows = next(each.rows for each in (*roots, *inputs) if isinstance(each, BatchTensor))
    return tuple(
        _true(gradient, of) if batch or gradient is None else mean_over_ranks(gradient, rows.ranks)
        for gradient, of, batch in zip(found, inputs, batches, strict=True)
    )


def _given(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    return dict(inspect.signature(func).bind(*args, **kwargs).arguments)


def _listed(value: Any) -> list[Any]:
    if value is None:
        return []
    return [value] if isinstance(value, torch.Tensor) or not isinstance(value, Sequence) else list(value)


def _here(value: Any) -> Any:
    return value.local if isinstance(value, BatchTensor) else value


def _start(root: Any, gradient: Any) -> Any:
    """What a backward pass begins with at a root: of its rows, the number of ranks times the true gradient."""
    if not isinstance(root, BatchTensor):
        return whole_of(gradient)
    if gradient is None:
        if root.numel() != 1:
            raise RuntimeError("grad can be implicitly created only for scalar outputs")
        gradient = torch.ones(root.shape, dtype=root.dtype, device=root.device)
    return rows_of(gradient, root.rows) * root.rows.ranks.size


def _true(gradient: Any, of: Any) -> Any:
    if gradient is None or not isinstance(of, BatchTensor):
        return gradient
    return BatchTensor(gradient / of.rows.ranks.size, of.rows)


def gather_for_own_functions() -> None:
    """Give functions that scripts derive from ``torch.autograd.Function`` the whole batch. Idempotent.

    Their ``apply`` calls no ``__torch_function__``, so it is replaced.
    """
    before = torch.autograd.Function.apply.__func__  # type: ignore[attr-defined]
    if hasattr(before, "__wrapped__"):
        return

    @functools.wraps(before)
    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        # Before 2.13, checkpoint() keeps by it what it computes from again; it computes nothing.
        keeps = cls.__name__ == "_NoopSaveInputs"
        if not keeps and any(isinstance(each, BatchTensor) for each in (*args, *kwargs.values())):
            return on_whole(functools.partial(before, cls), args, kwargs, cls.__name__)
        return before(cls, *args, **kwargs)

    torch.autograd.Function.apply = classmethod(apply)  # type: ignore[assignment, method-assign]


def dispatch_backward() -> None:
    """Let ``torch.autograd.backward`` take batches where PyTorch's own calls no ``__torch_function__``. Idempotent."""
    before = torch.autograd.backward
    if SINCE_2_13 or hasattr(before, "__wrapped__"):
        return

    @functools.wraps(before)
    def dispatched(tensors: Any, *args: Any, **kwargs: Any) -> None:
        roots = _listed(tensors)
        if has_torch_function(roots):
            handle_torch_function(before, roots, roots, *args, **kwargs)
        else:
            before(tensors, *args, **kwargs)

    torch.autograd.backward = dispatched


def watch_engine() -> None:
    """Replace the function that starts PyTorch's engine. Idempotent.

    ``torch.autograd.grad`` returns the mean over the ranks of gradients for plain tensors from now on, and a backward
    pass counts as one of those that are watched.
    """
    engine = torch.autograd._engine_run_backward  # type: ignore[attr-defined]
    if hasattr(engine, "__wrapped__"):
        return

    @functools.wraps(engine)
    def run(*args: Any, accumulate_grad: bool, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return engine(*args, accumulate_grad=accumulate_grad, **kwargs)
        if accumulate_grad:
            backward_begins()
            return engine(*args, accumulate_grad=True, **kwargs)
        with asking():
            found = engine(*args, accumulate_grad=False, **kwargs)
        ranks = known_ranks()
        # In a backward pass it is a hook within a model that asks for gradients of this rank's rows.
        if ranks is None or running.rows is not None or running.asks or in_backward():
            return found
        return tuple(each if each is None else mean_over_ranks(each, ranks) for each in found)

    torch.autograd._engine_run_backward = run  # type: ignore[attr-defined]
