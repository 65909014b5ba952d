"""What a model's first call on a rank's rows shows: what it leaves in the model, and which dimensions are rows."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._pytree import tree_leaves, tree_map

from hpctrain.worker.adapters.torch.batch.ranks import DataRanks, Rows
from hpctrain.worker.adapters.torch.batch.tensor import running
from hpctrain.worker.adapters.torch.guarding import checksums

# The most names in a message.
_NAMED = 5
# What torch.nn.Module keeps of its own.
_OWN_ATTRIBUTES = frozenset(vars(nn.Module()))


class Left(NamedTuple):
    """What a call has left on a rank.

    Attributes:
        keeping: the parts of the model that keep a tensor with a graph, such as an auxiliary loss.
        kept: the parts that keep another tensor than before, with the checksums of such.
        moved: buffers and kept tensors that have other values than before, each with a checksum.
    """

    keeping: tuple[str, ...] = ()
    kept: tuple[tuple[str, int], ...] = ()
    moved: tuple[tuple[str, int], ...] = ()


class ModuleState:
    """What calls of a module change: its parts' attributes, what lists and dictionaries among these hold, buffers."""

    def __init__(self, module: nn.Module) -> None:
        self._attributes = [(vars(part), dict(vars(part))) for part in module.modules()]
        # Not parameters: FSDP2 has put whole ones there for the call, and knows of it.
        items = (item for _, before in self._attributes for item in before.items())
        values = [value for name, value in items if name == "_buffers" or name not in _OWN_ATTRIBUTES]
        self._members = [(value, copy.copy(value)) for value in values if isinstance(value, list | dict | set)]
        self._buffers = [(each, each.detach().clone()) for each in module.buffers()]

    def restore(self) -> None:
        """Undo the changes."""
        for now, before in (*self._attributes, *self._members):
            now.clear()
            now.extend(before) if isinstance(now, list) else now.update(before)
        with torch.no_grad():
            for buffer, values in self._buffers:
                buffer.copy_(values)


class FirstCall(ModuleState):
    """The state of a module before its first call in a training."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        self._module = module
        self._kept = [tensor for _, tensor in self._tensors()]  # alive, so that no other tensor gets the id of one
        self._before = dict(self._states())

    def _tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The tensors that are plain attributes, or in containers that are, with the names of the modules."""
        for name, part in self._module.named_modules():
            for key, value in list(vars(part).items()):
                if key not in _OWN_ATTRIBUTES:
                    yield from ((name, each) for each in tree_leaves(value) if isinstance(each, torch.Tensor))

    def _states(self) -> Iterator[tuple[str, int]]:
        """Checksums of what samples may move. Scripts are told of the statistics of batch norms later."""
        for name, part in self._module.named_modules():
            values = {} if isinstance(part, _BatchNorm) else {**part._buffers, **vars(part)}
            for key, value in values.items():
                if type(value) is torch.Tensor and value.grad_fn is None and value.layout is torch.strided:
                    yield f"{name}.{key}".lstrip("."), int(checksums([value])[0])

    def left(self) -> Left:
        """What the call has left."""
        known = set(map(id, self._kept))
        new = [(name, tensor) for name, tensor in self._tensors() if id(tensor) not in known]
        keeping = {name for name, tensor in new if tensor.grad_fn is not None}
        plain = [each for each in new if type(each[1]) is torch.Tensor and each[1].layout is torch.strided]
        kept = tuple((name, int(checksums([tensor.detach()])[0])) for name, tensor in plain)
        moved = ((name, value) for name, value in self._states() if self._before.get(name, value) != value)
        return Left(tuple(sorted(keeping)), kept, tuple(moved))


def keeping_parts(found: Sequence[Left]) -> list[str]:
    """The parts that keep a tensor which depends on a rank's samples: with a graph, or different on the ranks."""
    keeping = {name for left in found for name in left.keeping}
    everyone = [Counter(left.kept) for left in found]
    return sorted(keeping.union(name for each in everyone for name, _ in each - everyone[0] + (everyone[0] - each)))


def name_moved(ranks: DataRanks, model: str, found: Sequence[Left]) -> None:
    """Say which state of a model the samples have moved differently on the ranks."""
    everyone = [dict(left.moved) for left in found]
    names = [name for name, value in everyone[0].items() if any(each.get(name) != value for each in everyone)]
    if names:
        more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
        ranks.comm.say(
            f"warning: {', '.join(names[:_NAMED])}{more} of {model} follow each rank's own samples, and differ between "
            "the ranks; average them by hand, or compute them outside of the model, where a batch is whole"
        )


# Results that say nothing about rows.
_CONSTANTS = (str, bytes, bool, torch.dtype, torch.device)
Dims = tuple[int, ...] | None


def long_dims(value: Any, rows: Rows) -> Dims:
    """The dimensions of a result that may be those of the rows, by their length; None for what has no rows."""
    shape = value.shape if isinstance(value, torch.Tensor) else ()
    return tuple(dim for dim, size in enumerate(shape) if size == rows.size) or None


def results_of(returned: Any, *, whole_losses: bool) -> list[Any]:
    """The parts of what a model returned, but for constants, in an order that is the same on every rank.

    Args:
        whole_losses: whether the model added its losses up over the ranks itself, so that numbers need no rows.
    """
    return [each for each in tree_leaves(returned) if not _is_constant(each, whole_losses)]


def _is_constant(value: Any, whole_losses: bool) -> bool:
    if value is None or isinstance(value, _CONSTANTS):
        return True
    if isinstance(value, torch.Tensor):
        return whole_losses and value.dim() == 0
    # The keys and values that a language model keeps for its next call go back to it as they are.
    return any(kind.__module__ == "transformers.cache_utils" for kind in type(value).__mro__)


def agreed_dims(found: Sequence[Sequence[Dims]], *, first: int, others: int, even: bool) -> Dims:
    """The dimension of the rows of each result, from what all ranks found; None where a result has no such dimension.

    Ranks have different numbers of rows where a batch does not divide evenly, which rules coincidences out: a result
    with two such dimensions has a number for each pair of rows.

    Args:
        found: for each rank and result, the dimensions that are as long as the rank has rows.
        first: of several possible dimensions, that of the first result.
        others: that of further ones.
        even: whether all ranks have as many rows.
    """
    dims: list[int] = []
    for number, results in enumerate(zip(*found, strict=True)):
        if any(each is None for each in results):
            return None
        common = set(results[0] or ()).intersection(*(each or () for each in results))
        if not common or (len(common) > 1 and not even):
            return None
        usual = others if number else first
        dims.append(usual if usual in common else min(common))
    return tuple(dims)


def may_coincide(found: Sequence[Dims], rows: Rows) -> bool:
    """Whether the dimensions that are as long as this rank's rows may be others."""
    return len(set(rows.sizes)) == 1 and (len(found) > 1 or any(len(dims or ()) > 1 for dims in found))


def dims_of_rows(found: Sequence[Dims], longer: Sequence[Any] | None, rows: Rows) -> list[Dims]:
    """The dimension of each result that has become longer by the additional row; None where there are several."""
    if longer is None or len(longer) != len(found):
        return list(found)
    more = rows.sized(size + 1 for size in rows.sizes)
    pairs = zip(found, (long_dims(each, more) or () for each in longer), strict=True)
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


def results_without_traces(module: nn.Module, call: Callable[[], list[Any]], arguments: Any) -> list[Any] | None:
    """What a call of a module returns that leaves nothing behind; None if it fails, or could change its arguments."""
    if not all(
        each is None or isinstance(each, torch.Tensor | bool | int | float | str) for each in tree_leaves(arguments)
    ):
        return None
    before = ModuleState(module)
    try:
        running.tries = True
        devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
        with torch.no_grad(), torch.random.fork_rng(devices):
            return call()
    except Exception:
        return None
    finally:
        running.tries = False
        before.restore()
