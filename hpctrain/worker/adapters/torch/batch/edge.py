"""The edge of a distributed model: it computes this rank's rows, and gives back batches.

``torch.nn.Module.__call__`` is replaced, because PyTorch's hooks for all modules get no keyword arguments, and slow
every part of a model down. The outermost call of a module that belongs to a distributed model, or holds one, takes this
rank's rows out of the batches among its arguments. Calls within it are plain; a part that is called alone, as in
``model.encoder(x)``, has an edge of its own.

What a model returns has to have rows. A result without rows, such as a loss that the model computed itself, is not that
of the whole batch: such a module is called once more, with the whole batch, its parts being the models, and so in every
later call.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import xxhash
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map

from hpctrain.worker.adapters.torch.batch.elementwise import for_rows
from hpctrain.worker.adapters.torch.batch.first_call import (
    FirstCall,
    Left,
    agreed_dims,
    dims_of_rows,
    keeping_parts,
    long_dims,
    may_coincide,
    name_moved,
    results_of,
    results_without_traces,
    with_a_row_more,
)
from hpctrain.worker.adapters.torch.batch.ranks import Rows, own_rows
from hpctrain.worker.adapters.torch.batch.tensor import BatchTensor, rows_of, running, whole_of
from hpctrain.worker.adapters.torch.generators import device_generators
from hpctrain.worker.adapters.torch.trainable import is_distributed, take_new_parameters


@dataclass
class _Known:
    """What earlier calls of a module have shown.

    Attributes:
        whole: whether it is called with whole batches, its parts being the models.
        recurrent: the lengths of the first dimension of its recurrent layers' states, whose rows are the second one.
        dims: the dimension of the rows of each tensor that it returns, by the number of these.
        looked: for which modes, of training and of recording gradients, it was looked for tensors that it keeps.
        constants: the places and forms of plain arguments that once had another length than the batch: no rows.
    """

    recurrent: frozenset[int]
    whole: bool = False
    dims: dict[int, tuple[int, ...]] = field(default_factory=dict)
    looked: set[tuple[bool, bool]] = field(default_factory=set)
    constants: set[tuple[Any, ...]] = field(default_factory=set)


_known: weakref.WeakKeyDictionary[nn.Module, _Known] = weakref.WeakKeyDictionary()


def watch_models() -> None:
    """Make distributed models compute this rank's rows of batches from now on. Idempotent."""
    before = nn.Module.__call__
    if hasattr(before, "__wrapped__"):
        return

    @functools.wraps(before)
    def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if running.rows is None and not torch.compiler.is_compiling() and _has_edge(module, args, kwargs):
            return _at_edge(module, args, kwargs)
        return _plain_call(module, *args, **kwargs)

    nn.Module.__call__ = call  # type: ignore[method-assign]


def _has_edge(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a module belongs to a distributed model, or gets batches and holds one, as a compiled model's wrapper."""
    if is_distributed(module):
        return True
    batches = any(isinstance(each, BatchTensor) for each in _leaves(args, kwargs))
    return batches and any(map(is_distributed, module.modules()))


def _plain_call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    compiled = module._compiled_call_impl
    run: Callable[..., Any] = module._call_impl if compiled is None else compiled
    if (module._forward_hooks or module._forward_pre_hooks) and running.rows and not torch.compiler.is_compiling():
        with hooks_of_batches(module):
            return run(*args, **kwargs)
    return run(*args, **kwargs)


def _at_edge(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    take_new_parameters()
    leaves = list(_leaves(args, kwargs))
    batches = [each for each in leaves if isinstance(each, BatchTensor)]
    if not batches:
        return _plain_call(module, *args, **kwargs)
    known = _known.get(module)
    if known is None:
        known = _known[module] = _Known(_states_of(module))
    if known.whole:
        return _plain_call(module, *args, **kwargs)
    rows = _common_rows(batches)
    plain = [(place, each) for place, each in enumerate(leaves) if type(each) is torch.Tensor and each.dim()]
    if rows is None or any(_is_square(each, rows) for _, each in plain):
        args, kwargs = tree_map(whole_of, (args, kwargs))
        return _plain_call(module, *args, **kwargs)
    return _on_rows(module, known, rows, _constants(known, rows.total, plain), args, kwargs)


def _constants(known: _Known, total: int, plain: list[tuple[int, torch.Tensor]]) -> frozenset[int]:
    """The ids of plain arguments that are no rows, as a call with a batch of another length has shown."""
    found = []
    for place, value in plain:
        form = place, value.dtype, value.shape[1:]
        if total not in value.shape[: 2 if known.recurrent else 1]:
            known.constants.add(form)
        elif form in known.constants:
            found.append(id(value))
    return frozenset(found)


def _leaves(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[Any]:
    for value in (*args, *kwargs.values()):
        if isinstance(value, torch.Tensor) or value is None:
            yield value
        else:
            yield from tree_leaves(value)


def _is_square(value: torch.Tensor, rows: Rows) -> bool:
    """Whether a plain tensor may have rows in both dimensions, such as a graph's edges, or none, as a mask of steps."""
    return value.dim() == 2 and value.shape[0] == value.shape[1] == rows.total > 1


def _common_rows(batches: list[BatchTensor]) -> Rows | None:
    """One division of all batches; None where they have different rows, or some ranks would have none."""
    rows = batches[0].rows
    if 0 in rows.sizes or any(each.rows.sizes != rows.sizes for each in batches):
        if any(each.rows.total != rows.total for each in batches):
            return None
        rows = rows.even()
    return None if 0 in rows.sizes else rows


def _on_rows(
    module: nn.Module, known: _Known, rows: Rows, constants: frozenset[int], args: tuple[Any, ...], kwargs: Any
) -> Any:
    def part(value: Any) -> Any:
        return _part(value, rows, known.recurrent, constants) if isinstance(value, torch.Tensor) else value

    def take(value: Any) -> Any:
        plain = value is None or isinstance(value, torch.Tensor | bool | int | float | str)
        return part(value) if plain else tree_map(part, value)

    own_args, own_kwargs = tuple(map(take, args)), {name: take(value) for name, value in kwargs.items()}
    mode = module.training, torch.is_grad_enabled()
    first = FirstCall(module) if any(mode) and mode not in known.looked else None
    known.looked.add(mode)
    losses = rows.ranks.losses
    with RankStream(rows.ranks.rank):
        returned = _run(module, rows, own_args, own_kwargs)
    if first is None and isinstance(returned, torch.Tensor):  # the common case
        dims = known.dims.get(1)
        if dims is not None and _fits(rows, returned, dims[0]):
            return BatchTensor(returned, rows.along(dims[0]))
    summed = rows.ranks.losses > losses
    results = results_of(returned, whole_losses=summed)

    def longer() -> list[Any] | None:
        more_args, more_kwargs = with_a_row_more((args, kwargs), (own_args, own_kwargs))
        return results_without_traces(
            module, lambda: results_of(_run(module, rows, more_args, more_kwargs), whole_losses=summed), (args, kwargs)
        )

    dims = _dims_of(module, known, rows, results, first, longer)
    if dims is None:
        return _plain_call(module, *args, **kwargs)
    by_id = {id(result): dim for result, dim in zip(results, dims, strict=True)}

    def wrap(value: Any) -> Any:
        dim = by_id.get(id(value))
        return value if dim is None else BatchTensor(value, rows.along(dim))

    return tree_map(wrap, returned)


def _run(module: nn.Module, rows: Rows, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    running.rows = rows
    try:
        return _plain_call(module, *args, **kwargs)
    finally:
        running.rows = None


def _states_of(module: nn.Module) -> frozenset[int]:
    layers = [each for each in module.modules() if isinstance(each, nn.RNNBase)]
    return frozenset(each.num_layers * (2 if each.bidirectional else 1) for each in layers)


def _part(value: torch.Tensor, rows: Rows, recurrent: frozenset[int], constants: frozenset[int]) -> torch.Tensor:
    """What a running model gets of a tensor: this rank's rows of a batch, or of a plain one with as many rows."""
    if isinstance(value, BatchTensor):
        return rows_of(value, rows.along(value.rows.dim))
    if rows.total > 1 and id(value) not in constants:
        dims = (0, 1) if recurrent else (0,)
        if value.dim() == 3 and value.shape[0] in recurrent:
            dims = (1, 0)
        for dim in dims:
            if dim < value.dim() and value.shape[dim] == rows.total:
                return own_rows(value, rows.along(dim))
    return for_rows(value, rows)


def _dims_of(
    module: nn.Module,
    known: _Known,
    rows: Rows,
    results: list[Any],
    first: FirstCall | None,
    longer: Callable[[], list[Any] | None],
) -> tuple[int, ...] | None:
    """The dimension of the rows of each result; None if the module has to be called with the whole batch."""
    dims = known.dims.get(len(results))
    pairs = zip(results, dims, strict=True) if first is None and dims is not None else None
    if pairs and all(_fits(rows, result, dim) for result, dim in pairs):
        return dims
    left, own = first.left() if first else Left(), [long_dims(result, rows) for result in results]
    if may_coincide(own, rows):
        own = dims_of_rows(own, longer(), rows)
    found = rows.ranks.comm.allgather_object((left, own))
    others, even = 1 if known.recurrent else rows.dim, len(set(rows.sizes)) == 1
    dims = agreed_dims([each for _, each in found], first=rows.dim, others=others, even=even)
    keeping = keeping_parts([left for left, _ in found])
    if dims is not None and not keeping:
        known.dims[len(results)] = dims
        name_moved(rows.ranks, type(module).__name__, [left for left, _ in found])
        return dims
    known.whole = True
    for name in keeping:
        _call_whole(module, name)
    if first:
        first.restore()
    return None


def _fits(rows: Rows, result: Any, dim: int) -> bool:
    return isinstance(result, torch.Tensor) and result.dim() > dim and result.shape[dim] == rows.size


def _call_whole(module: nn.Module, name: str) -> None:
    """Call the part of this name with whole batches from now on, and all parts around it."""
    part = module
    for step in name.split(".") if name else ():
        part = getattr(part, step)
        known = _known.get(part) or _Known(_states_of(part))
        known.whole = True
        _known[part] = known


class RankStream:
    """A context manager in which PyTorch's generators draw numbers of this data rank's own. Made anew for each use.

    Outside of models all ranks share one stream, that of one process. A model's numbers follow from the state of that
    stream and from the rank. The shared stream moves on by one number if the model has drawn any, so that the next call
    draws others, and a script that restores the shared stream, as on resuming, restores all.

    Args:
        agree: whether any rank has drawn from each generator, for models of which other ranks compute other parts.
    """

    def __init__(self, rank: int, agree: Callable[[list[bool]], list[bool]] = list) -> None:
        self._agree = agree
        self._shared = [(generator, generator.get_state()) for generator in device_generators()]
        for generator, shared in self._shared:
            generator.manual_seed(xxhash.xxh3_64_intdigest(shared.numpy().data, seed=rank) >> 1)  # below 2**63
        self._begun = [generator.get_state() for generator, _ in self._shared]

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, *others: object) -> None:
        pairs = zip(self._shared, self._begun, strict=True)
        drawn = [kind is None and not torch.equal(generator.get_state(), begun) for (generator, _), begun in pairs]
        for (generator, shared), moves in zip(self._shared, drawn if kind else self._agree(drawn), strict=True):
            generator.set_state(shared)
            if moves:
                torch.rand(1, generator=generator, device=generator.device)


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
