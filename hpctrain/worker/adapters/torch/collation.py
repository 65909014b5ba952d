"""Makes of the samples of a global batch what this rank's script is given of it.

Where the ``collate_fn`` treats each sample by itself, as PyTorch's own does, each rank collates its own samples. Any
other may do with a batch what it likes: pad samples to the longest, mix them, or leave some out. There each rank
collates all samples and keeps its rows of the tensors, so a batch is that of one process.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import itertools
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.nn.utils.rnn import PackedSequence
from torch.utils.data import default_collate

from hpctrain.common.errors import HpctrainError
from hpctrain.worker.adapters.data_ranks import DataPlace
from hpctrain.worker.adapters.same_data import leaves
from hpctrain.worker.adapters.torch.batch.ranks import Rows, data_ranks
from hpctrain.worker.adapters.torch.batch.tensor import BatchTensor
from hpctrain.worker.adapters.torch.generators import Generators
from hpctrain.worker.comm import Communicator
from hpctrain.worker.data.sampling import part_of

# The dimensions that count samples are found by batches of this many copies of a sample, of so many samples.
_COUNTS, _TRIED = (2, 5), 4

# The names of the functions of which the script was told what they cost.
_told: set[str] = set()


class Axis(NamedTuple):
    """The dimension of a tensor that counts samples, and how many rows of it belong to a sample."""

    dim: int
    rows: int = 1


class Part(NamedTuple):
    """What a rank, or one of its worker processes, has made of a batch: this rank's rows as plain tensors."""

    batch: Any
    # The dimension that counts rows in the tensor at each place, and how many of them each data rank has.
    sizes: Mapping[str, tuple[int, Sequence[int]]] = {}
    # How many texts are this rank's, in lists that have those of its samples; None where they have all.
    texts: int | None = None
    # The collate_fn for which each rank reads all samples.
    reads_all: str = ""


class Collation:
    """The ``collate_fn`` of a loader, for the ranks that divide its batches."""

    def __init__(self, collate: Callable[[Any], Any], *, by_sample: bool) -> None:
        self._collate = collate
        # It treats each sample by itself, as a script states; PyTorch's own does.
        self.by_sample = by_sample or collate is default_collate
        self._axes: dict[str, Axis] | None = None

    def fetched(self, total: int, place: DataPlace) -> slice:
        """Which samples of a batch of ``total`` this rank has to collate: one at least, to see what they look like."""
        if place.ranks == 1 or not self.by_sample:
            return slice(0, total)
        own = part_of(total, *place)
        return own if own.start < own.stop else slice(0, 1)

    def __call__(self, samples: Any, total: int, place: DataPlace) -> Part:
        """Collate the samples that were :meth:`fetched` of a batch of ``total``."""
        if place.ranks == 1:
            return Part(self._collate(samples))
        if self._collate is not default_collate and self._axes is None:
            self._axes = axes_of(self._collate, samples)
        counts = [own.stop - own.start for own in (part_of(total, rank, place.ranks) for rank in range(place.ranks))]
        batch = self._collate(samples)
        sizes: dict[str, tuple[int, Sequence[int]]] = {}

        def own_rows(path: str, leaf: Any) -> Any:
            axis = Axis(0) if self._axes is None else self._axes.get(path)
            if axis is None or not _has_rows(leaf) or leaf.dim() <= axis.dim:
                if self.by_sample and isinstance(leaf, torch.Tensor | np.ndarray | PackedSequence):
                    raise _not_by_sample(f"a {type(leaf).__name__} with no dimension that counts samples")
                return leaf
            rows = self._rows(leaf.shape[axis.dim], axis, counts, place)
            sizes[path] = axis.dim, rows
            begin = 0 if self.by_sample else sum(rows[: place.rank])
            if leaf.shape[axis.dim] == rows[place.rank]:
                return leaf
            return leaf.narrow(axis.dim, begin, rows[place.rank]).clone(memory_format=torch.contiguous_format)

        if self.by_sample or self._axes:
            batch = changed(batch, own_rows)
        if self.by_sample:
            return Part(batch, sizes, texts=counts[place.rank])
        name = getattr(self._collate, "__qualname__", type(self._collate).__name__)
        return Part(batch, sizes, reads_all=name)

    def _rows(self, size: int, axis: Axis, counts: list[int], place: DataPlace) -> tuple[int, ...]:
        """How many rows each rank has, where the collated samples have ``size``."""
        expected = tuple(axis.rows * count for count in counts)
        if self.by_sample:
            if size != (expected[place.rank] or axis.rows):
                raise _not_by_sample(f"{size} rows of {counts[place.rank] or 1} samples")
            return expected
        if size == sum(expected):
            return expected
        parts = [part_of(size, rank, place.ranks) for rank in range(place.ranks)]
        return tuple(part.stop - part.start for part in parts)


def _not_by_sample(made: str) -> HpctrainError:
    return HpctrainError(
        "HT-loader-not-by-sample",
        "the collate_fn has made {made}, so it does not treat each sample by itself",
        "leave collate_by_sample=True out: each rank then collates the whole batch",
        made=made,
    )


def joined(part: Part, comm: Communicator) -> Any:
    """A batch as the script gets it: its tensors are those of all ranks. Collective where it has texts."""
    if part.reads_all:
        _tell(part, comm)
    if not part.sizes and part.texts is None:
        return part.batch
    ranks = data_ranks(comm)
    # PyTorch's thread that pins memory makes lists of tuples.
    rows = {path: Rows(ranks, tuple(sizes), dim) for path, (dim, sizes) in part.sizes.items()}
    texts: list[Sequence[Any]] = []

    def batch_tensor(path: str, leaf: Any) -> Any:
        if path in rows:
            return BatchTensor(leaf, rows[path])
        if part.texts is not None and _are_texts(leaf):
            texts.append(leaf[: part.texts])
        return leaf

    batch = changed(part.batch, batch_tensor)
    if not texts:
        return batch
    parts = dict(comm.agreement().gather((ranks.rank, texts)))
    lists = zip(*(parts[rank] for rank in range(ranks.size)), strict=True)
    whole = iter([list(itertools.chain.from_iterable(each)) for each in lists])
    return changed(batch, lambda _, leaf: type(leaf)(next(whole)) if _are_texts(leaf) else leaf)


def _tell(part: Part, comm: Communicator) -> None:
    """Say once of a collate_fn what it costs that each rank reads all samples."""
    if part.reads_all in _told:
        return
    _told.add(part.reads_all)
    divided = "" if part.sizes else ", and computes them, since it makes no tensor with a dimension that counts samples"
    comm.say(
        f"every rank reads all samples of each batch for the collate_fn {part.reads_all}{divided}. If it treats each "
        "sample by itself, ht.shard(loader, collate_by_sample=True) lets each rank read its own only. With a "
        "DistributedSampler in place of ht.shard each rank has batches of its own"
    )


def changed(value: Any, change: Callable[[str, Any], Any], path: str = "") -> Any:
    """A copy of a batch with ``change(path, leaf)`` in place of each leaf; paths are those of ``same_data.leaves``.

    Leaves are what is no container, lists of texts, and the tensors that PyTorch packs of sequences.
    """

    def member(key: Any, each: Any) -> Any:
        return changed(each, change, f"{path}[{key!r}]")

    if isinstance(value, Mapping):
        return _mapping(value, {key: member(key, each) for key, each in value.items()})
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        made = copy.copy(value)
        for field in dataclasses.fields(value):
            object.__setattr__(made, field.name, member(field.name, getattr(value, field.name)))
        return made
    if isinstance(value, list | tuple) and not isinstance(value, PackedSequence) and not _are_texts(value):
        members = [member(number, each) for number, each in enumerate(value)]
        return type(value)(*members) if hasattr(value, "_fields") else type(value)(members)
    return change(path, value)


def _mapping(value: Mapping[Any, Any], members: dict[Any, Any]) -> Any:
    if type(value) is dict:
        return members
    if not isinstance(value, MutableMapping):
        return type(value)(members)  # type: ignore[call-arg]
    made = copy.copy(value)  # may have attributes of its own, and no arguments
    for key, each in members.items():
        made[key] = each
    return made


def _are_texts(value: Any) -> bool:
    return isinstance(value, list | tuple) and bool(value) and all(isinstance(each, str | bytes) for each in value)


def _has_rows(leaf: Any) -> bool:
    return type(leaf) is torch.Tensor and leaf.layout is torch.strided and not leaf.is_nested


def axes_of(collate: Callable[[list[Any]], Any], samples: Any) -> dict[str, Axis]:
    """The dimensions that count samples in what ``collate`` makes, as far as copies of a few samples show them."""
    found: list[dict[str, Axis]] = []
    tried: list[Any] = []
    with contextlib.suppress(TypeError):  # a batch that is no list of samples
        tried = list(samples)[:_TRIED]
    for sample in tried:
        with Generators().kept(), contextlib.suppress(Exception):  # a sample that it leaves out
            found.append(_axes(collate, sample))
    found = [each for each in found if each] or [{}]
    return {path: axis for path, axis in found[0].items() if all(each.get(path) == axis for each in found)}


def _axes(collate: Callable[[list[Any]], Any], sample: Any) -> dict[str, Axis]:
    shapes: list[dict[str, tuple[int, ...]]] = []
    for count in _COUNTS:
        # Copied because a collate_fn may change its samples.
        made = collate([copy.deepcopy(sample) for _ in range(count)])
        shapes.append({path: tuple(leaf.shape) for path, leaf in leaves(made) if _has_rows(leaf)})
    found = {}
    for path, few in shapes[0].items():
        many = shapes[1].get(path, ())
        pairs = enumerate(zip(few, many, strict=False)) if len(few) == len(many) else ()
        axes = [Axis(dim, a // _COUNTS[0]) for dim, (a, b) in pairs if a and (a * _COUNTS[1] == b * _COUNTS[0])]
        if len(axes) == 1 and few[axes[0].dim] % _COUNTS[0] == 0:
            found[path] = axes[0]
    return found
