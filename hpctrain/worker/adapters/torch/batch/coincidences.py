"""Which dimensions of a model's results are rows, where others are as long: found by one more call, with one row more.

Where ranks have different numbers of rows, their results tell by themselves. Where all have as many, a table of the
model or a sequence's steps may have the same length.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map

from hpctrain.worker.adapters.torch.batch.first_call import ModuleState
from hpctrain.worker.adapters.torch.batch.results import Result
from hpctrain.worker.adapters.torch.batch.rows import Rows
from hpctrain.worker.adapters.torch.batch.tensor import running

Dims = tuple[int, ...] | None


def may_coincide(found: Sequence[Dims], rows: Rows) -> bool:
    """Whether the dimensions that are as long as this rank's rows may be others."""
    return len(set(rows.sizes)) == 1 and (len(found) > 1 or any(len(dims or ()) > 1 for dims in found))


def dims_of_rows(found: Sequence[Dims], longer: Sequence[Result] | None, rows: Rows) -> list[Dims]:
    """The dimension of each result that has become longer by the additional row; None where there are several."""
    if longer is None or len(longer) != len(found):
        return list(found)
    more = rows.sized(size + 1 for size in rows.sizes)
    pairs = zip(found, (each.dims(more) or () for each in longer), strict=True)
    of_rows = [tuple(dim for dim in dims or () if dim in grown) for dims, grown in pairs]
    return [dims if len(dims) == 1 else None for dims in of_rows]


def with_a_row_more(whole: Any, own: Any) -> Any:
    """A rank's arguments, made of those of the whole batch, in which its first row comes once more at the end."""
    return tree_map(_longer, whole, own)


def _longer(whole: Any, own: Any) -> Any:
    if not isinstance(whole, torch.Tensor) or whole.shape == own.shape:
        return own
    dim = next(dim for dim, sizes in enumerate(zip(whole.shape, own.shape, strict=True)) if len(set(sizes)) > 1)
    return torch.cat([own, own.narrow(dim, 0, 1)], dim)


def results_without_traces(module: nn.Module, call: Callable[[], list[Result]], arguments: Any) -> list[Result] | None:
    """What a call of a module returns that leaves nothing behind; None if it fails, or could change its arguments."""
    if not all(
        each is None or isinstance(each, torch.Tensor | bool | int | float | str) for each in tree_leaves(arguments)
    ):
        return None
    before = ModuleState(module)
    try:
        running.tries = True
        with torch.no_grad(), _restored_streams():
            return call()
    except Exception:
        return None
    finally:
        running.tries = False
        before.restore()


def _restored_streams() -> contextlib.AbstractContextManager[None]:
    devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
    return torch.random.fork_rng(devices)
