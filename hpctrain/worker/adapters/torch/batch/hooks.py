"""Hooks that a script registers on modules: within a running model they get batches, as the script around them does."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map

from hpctrain.worker.adapters.torch.batch.rows import Rows
from hpctrain.worker.adapters.torch.batch.tensor import BatchTensor, rows_of, running

# Hooks of these packages are a part of the model.
_LIBRARIES = ("torch.", "hpctrain.")
_KINDS = ("_forward_hooks", "_forward_pre_hooks")


@contextlib.contextmanager
def hooks_of_batches(module: nn.Module) -> Iterator[None]:
    """A context manager in which a module's hooks get batches, but for those of libraries."""
    attributes = vars(module)
    before = {kind: attributes[kind] for kind in _KINDS}
    try:
        for kind, hooks in before.items():
            attributes[kind] = {key: hook if _is_library(hook) else _of_batches(hook) for key, hook in hooks.items()}
        yield
    finally:
        attributes.update(before)


def _is_library(hook: Any) -> bool:
    return f"{getattr(hook, '__module__', '')}.".startswith(_LIBRARIES)


def _of_batches(hook: Callable[..., Any]) -> Callable[..., Any]:
    def call(module: nn.Module, *given: Any) -> Any:
        if running.tries:
            return None
        rows, running.rows = running.rows, None
        assert rows is not None
        try:
            instead = hook(module, *tree_map(lambda each: _batch(each, rows), given))
            return tree_map(lambda each: _own(each, rows), instead)
        finally:
            running.rows = rows

    return call


def _batch(value: Any, rows: Rows) -> Any:
    """The batch that a tensor is the part of; anything else as it is."""
    if type(value) is not torch.Tensor:
        return value
    dims = [dim for dim, size in enumerate(value.shape) if size == rows.size]
    return BatchTensor(value, rows.along(rows.dim if rows.dim in dims else dims[0])) if dims else value


def _own(value: Any, rows: Rows) -> Any:
    return rows_of(value, rows.along(value.rows.dim)) if isinstance(value, BatchTensor) else value
