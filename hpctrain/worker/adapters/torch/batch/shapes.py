"""Views, joins and parts of batches: where rows stay in order on their ranks, nothing is sent."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

from hpctrain.worker.adapters.torch.batch.elementwise import for_rows, part_of
from hpctrain.worker.adapters.torch.batch.ranks import Rows, own_rows
from hpctrain.worker.adapters.torch.batch.tensor import (
    BatchTensor,
    forget_copy,
    named,
    place_of,
    rule,
    watched,
    whole_of,
)

T = torch.Tensor


@rule(*named("reshape flatten unflatten squeeze", torch, T), *named("view view_as reshape_as", T))
def reshape(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The rows in another shape, where that divides no rank's elements differently.

    In the order of memory, what comes before the rows' dimension stays; behind it each rank holds a contiguous part.
    """
    x, types = args[0], [each for each in (*args, *kwargs.values()) if isinstance(each, torch.dtype)]
    if not isinstance(x, BatchTensor) or not x.numel() or types:
        return NotImplemented
    shape = func(*tree_map(_without_memory, args), **kwargs).shape
    outer, inner = prod(x.shape[: x.rows.dim]), prod(x.shape[x.rows.dim + 1 :])
    for dim in reversed(range(len(shape))):
        step = prod(shape[dim + 1 :])
        if prod(shape[:dim]) == outer and shape[dim] != 1 and not any(size * inner % step for size in x.rows.sizes):
            sizes = [size * inner // step for size in x.rows.sizes]
            local = [*shape[:dim], sizes[x.rows.ranks.rank], *shape[dim + 1 :]]
            return BatchTensor(x.local.reshape(local), Rows(x.rows.ranks, tuple(sizes), dim))
    return NotImplemented


def _without_memory(value: Any) -> Any:
    return torch.empty(value.shape, device="meta") if isinstance(value, BatchTensor) else value


# The stride of the rows in a tensor without memory, whose other dimensions have 0. A new one gets twice it, 1 or 0.
_OF_ROWS = 3


@rule(
    *named("transpose swapaxes swapdims permute unsqueeze unbind t adjoint", torch, T),
    *(getattr(T, name).__get__ for name in ("T", "mT", "H", "mH")),
)
def view(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A view with the dimensions in another order, with a new one, or without another one than that of the rows."""
    x = args[0]
    if not isinstance(x, BatchTensor):
        return NotImplemented
    shape, strides = list(x.shape), [0] * x.dim()
    shape[x.rows.dim], strides[x.rows.dim] = 2, _OF_ROWS
    seen = func(torch.empty_strided(shape, strides, device="meta"), *args[1:], **kwargs)
    strides = [stride for part in tree_leaves(seen)[:1] for stride in part.stride()]
    if _OF_ROWS not in strides:
        return NotImplemented
    rows = x.rows.along(strides.index(_OF_ROWS))
    return tree_map(lambda part: BatchTensor(part, rows), func(x.local, *args[1:], **kwargs))


@rule(*named("cat concat concatenate", torch))
def join(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensors = list(args[0] if args else kwargs["tensors"])
    dim = kwargs.get("dim", kwargs.get("axis", args[1] if len(args) > 1 else 0))
    first = next((each for each in tensors if isinstance(each, BatchTensor)), None)
    if first is None or kwargs.get("out") is not None or not isinstance(dim, int):
        return NotImplemented
    dims = {each.dim() for each in tensors}
    if len(dims) > 1 or any(isinstance(each, BatchTensor) and each.rows.dim != first.rows.dim for each in tensors):
        return NotImplemented
    rows, dim = first.rows, place_of(dim, first.dim())
    if dim != rows.dim:
        if any(each.shape[rows.dim] != rows.total for each in tensors):
            return NotImplemented
        from_end = first.dim() - rows.dim
        return BatchTensor(torch.cat([part_of(each, rows, from_end) for each in tensors], dim), rows)
    if all(isinstance(each, BatchTensor) for each in tensors) and _in_order([each.rows.sizes for each in tensors]):
        sizes = [sum(each) for each in zip(*(each.rows.sizes for each in tensors), strict=True)]
        return BatchTensor(torch.cat([each.local for each in tensors], dim), rows.sized(sizes))
    # Divided anew, so that what follows is computed by all ranks.
    whole = torch.cat([whole_of(each) for each in tensors], dim)
    return divided(whole, rows.sized((whole.shape[dim],)))


def _in_order(sizes: Sequence[Sequence[int]]) -> bool:
    """Whether joined parts stay in the order of the ranks: each begins where the one before it has ended."""
    last = 0
    for each in sizes:
        held = [rank for rank, size in enumerate(each) if size]
        if held:
            if held[0] < last:
                return False
            last = held[-1]
    return True


def divided(whole: torch.Tensor, rows: Rows) -> BatchTensor:
    """A plain tensor that all ranks hold, divided evenly along the dimension of ``rows``, which has its length."""
    even = rows.even()
    return BatchTensor(own_rows(whole, even), even)


@rule(*named("split chunk tensor_split", torch, T))
def split(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    x = args[0]
    if not isinstance(x, BatchTensor) or not x.dim():
        return NotImplemented
    dim = kwargs.get("dim", args[2] if len(args) > 2 else 0)
    if not isinstance(dim, int):
        return NotImplemented
    dim = place_of(dim, x.dim())
    if dim != x.rows.dim:
        return tuple(BatchTensor(each, x.rows) for each in func(x.local, *args[1:], **kwargs))
    # Where PyTorch cuts, a tensor of the same length shows.
    marks = func(
        torch.arange(x.rows.total, device="cpu"), *args[1:2], **{k: v for k, v in kwargs.items() if k != "dim"}
    )
    ends = torch.tensor([len(each) for each in marks], device="cpu").cumsum(0).tolist()
    return tuple(_slice(x, end - len(each), end) for each, end in zip(marks, ends, strict=True))


def _slice(x: BatchTensor, begin: int, end: int, step: int = 1) -> BatchTensor:
    """The rows ``begin``, ``begin + step`` … below ``end``."""
    sizes, parts = [], []
    first = 0
    for size in x.rows.sizes:
        # The first of these rows on this rank, by its place among the rank's own rows.
        low = begin - first if begin >= first else -((first - begin) // -step) * step + begin - first
        high = min(end - first, size)
        sizes.append(max(0, -((high - low) // -step)))
        parts.append(slice(low, max(high, low), step))
        first += size
    part = parts[x.rows.ranks.rank]
    if not sizes[x.rows.ranks.rank]:
        part = slice(0, 0)
    index = (*[slice(None)] * x.rows.dim, part)
    return BatchTensor(x.local[index], x.rows.sized(sizes))


@rule(T.__getitem__)
def getitem(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    x, index = args
    if not isinstance(x, BatchTensor):
        return NotImplemented
    if isinstance(index, torch.Tensor):
        return _by_tensor(x, index)
    found = _entries(x, index if isinstance(index, tuple) else (index,))
    if found is None:
        return NotImplemented
    entries, at = found
    entry = entries[at]
    if isinstance(entry, slice):
        begin, end, step = entry.indices(x.rows.total)
        cut = x if (begin, end, step) == (0, x.rows.total, 1) else _slice(x, begin, max(end, begin), step)
        entries[at] = slice(None)
        before = entries[:at]
        dim = x.rows.dim + sum(each is None for each in before) - sum(isinstance(each, int) for each in before)
        return BatchTensor(cut.local[tuple(entries)], cut.rows.along(dim))
    if not -x.rows.total <= entry < x.rows.total:
        return NotImplemented  # an IndexError of PyTorch's own
    row = _slice(x, entry % x.rows.total, entry % x.rows.total + 1)
    entries[at] = slice(None)
    dim = x.rows.dim + sum(each is None for each in entries[:at]) - sum(isinstance(each, int) for each in entries[:at])
    # Only what is asked for of the row is sent.
    whole = BatchTensor(row.local[tuple(entries)], row.rows.along(dim)).whole()
    return watched(whole.select(dim, 0), [(whole, x.local)], "indexing")


def _entries(x: BatchTensor, index: tuple[Any, ...]) -> tuple[list[Any], int] | None:
    """An index of slices, numbers and None alone, without an ellipsis, and the place of the rows' entry in it."""
    entries = list(index)
    if not all(each is None or each is Ellipsis or type(each) in (int, slice) for each in entries):
        return None
    if any(isinstance(each, slice) and not _is_simple(each) for each in entries):
        return None
    used = sum(each is not None and each is not Ellipsis for each in entries)
    if used > x.dim() or entries.count(Ellipsis) > 1:
        return None
    fill = [slice(None)] * (x.dim() - used)
    at = entries.index(Ellipsis) if Ellipsis in entries else len(entries)
    entries[at : at + 1] = fill
    places = [place for place, each in enumerate(entries) if each is not None]
    return entries, places[x.rows.dim]


def _is_simple(part: slice) -> bool:
    return all(each is None or type(each) is int for each in (part.start, part.stop, part.step))


def _by_tensor(x: BatchTensor, index: torch.Tensor) -> Any:
    """Rows that a mask or numbers choose. They are a batch too, so that what follows is computed by all ranks."""
    if x.rows.dim or not x.dim() or (index.dim() != 1 and index.dtype == torch.bool):
        return NotImplemented
    if index.dtype == torch.bool and len(index) == x.rows.total:
        own = x.local[part_of(index, x.rows, 1)]
        counts = torch.zeros(x.rows.ranks.size, dtype=torch.float64, device="cpu")
        counts[x.rows.ranks.rank] = len(own)
        sizes = x.rows.ranks.sum(counts, "the number of chosen rows")
        return BatchTensor(own, x.rows.sized([int(each) for each in sizes]))
    if index.dim() != 1:
        return NotImplemented
    chosen = x.whole()[whole_of(index)]
    return divided(chosen, x.rows.sized((len(chosen),)))


@rule(T.__setitem__)
def setitem(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    x, index, value = args
    if not isinstance(x, BatchTensor):
        return NotImplemented
    forget_copy(value)
    number = not isinstance(value, torch.Tensor) or (not value.dim() and not isinstance(value, BatchTensor))
    found = _entries(x, index if isinstance(index, tuple) else (index,))
    if number and found is not None and isinstance(found[0][found[1]], slice):
        target = getitem(T.__getitem__, (x, index), {})
        target.local[...] = for_rows(value, x.rows) if isinstance(value, torch.Tensor) else value
        return None
    if isinstance(index, BatchTensor) and number and index.dtype == torch.bool and index.shape == x.shape:
        x.masked_fill_(index, value)
        return None
    # Any other index: what is written is laid out as the batch is.
    index = tree_map(whole_of, index)
    mask = torch.zeros(x.shape, dtype=torch.bool, device=x.device)
    values = torch.zeros(x.shape, dtype=x.dtype, device=x.device)
    mask[index], values[index] = True, whole_of(value)
    x.local.copy_(torch.where(own_rows(mask, x.rows), own_rows(values, x.rows), x.local))
    return None
