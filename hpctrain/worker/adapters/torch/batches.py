"""Finds the batch of a tensor: by memory shared with what a sharded loader yielded, or else by its shape."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from typing import Any, NamedTuple

import torch

from hpctrain.worker.adapters.torch.storages import Storages

# How deep a batch, a model's arguments or its outputs are searched for tensors: batches of graph libraries keep
# theirs in an object within an object.
_DEPTH = 6


class Mark(NamedTuple):
    """The batch whose samples lie in a storage.

    Attributes:
        total: the samples of the global batch; None for a batch of an evaluation.
        stride: the stride of the dimension that counts the samples, 0 where there is none.
        numel: how many elements the yielded tensor has.
    """

    total: int | None
    stride: int
    numel: int


class Batches:
    """The tensors that sharded loaders yielded, for as long as their memory is in use."""

    def __init__(self) -> None:
        self._marks: Storages[Mark] = Storages()
        self._numels: set[int] = set()
        self._first = True

    def add(self, batch: Any, total: int | None, count: int) -> None:
        """Note the tensors of a batch, in which this rank has ``count`` samples."""
        for tensor in tensors_in(batch):
            dimension = next((index for index, size in enumerate(tensor.shape) if size == count), None)
            if dimension is not None and total is not None:
                self._numels.add(tensor.numel() // count)
                self._first &= dimension == 0
            stride = 0 if dimension is None else tensor.stride(dimension)
            self._marks.add(tensor, Mark(total, stride, tensor.numel()))

    def marks(self, tensor: torch.Tensor) -> Set[Mark]:
        """The marks of the memory that a tensor lies in."""
        return self._marks.of(tensor)

    def counts(self, tensors: Sequence[torch.Tensor]) -> set[int]:
        """The numbers of samples of tensors that share no memory with a batch.

        Where what is left of a tensor's shape without one dimension has as many elements as a sample that was
        yielded, it is the size of that dimension. Where no tensor is like that (``x[:, 1:] / 255``), it is the size
        of their first dimension, if samples lie along the first one in every batch and all tensors agree on it. No
        other dimension is ever taken: that of a sample may be as large as another batch's share.
        """
        alike = {size for each in tensors for size in each.shape if _sample_numel(each, size) in self._numels}
        if alike:
            return alike
        shaped = [each for each in tensors if each.dim()]
        firsts = {each.shape[0] for each in shaped if each.numel() > 1} or {each.shape[0] for each in shaped}
        return firsts if self._first and len(firsts) == 1 else set()


def is_whole(mark: Mark, tensor: torch.Tensor, count: int) -> bool:
    """Whether a tensor in a batch's memory contains all ``count`` samples, however it is viewed."""
    if count == 1 or tensor.numel() == mark.numel:
        return True
    dimensions = zip(tensor.shape, tensor.stride(), strict=True)
    return any(size == count and stride == mark.stride for size, stride in dimensions)


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """The tensors in an object, its containers and its attributes, each once."""
    seen: set[int] = set()
    waiting = [(value, 0)]
    while waiting:
        each, depth = waiting.pop()
        if id(each) in seen:
            continue
        seen.add(id(each))
        if isinstance(each, torch.Tensor):
            yield each
        elif depth < _DEPTH:
            waiting += [(member, depth + 1) for member in _members(each)]


def _members(value: Any) -> Any:
    if isinstance(value, Mapping):
        return value.values()
    if isinstance(value, list | tuple | set | frozenset):
        return value
    if isinstance(value, torch.nn.Module | type):
        return ()
    return getattr(value, "__dict__", {}).values()


def _sample_numel(tensor: torch.Tensor, size: int) -> int:
    """The elements of each of ``size`` samples. 0 for single numbers, since any sequence may look like those."""
    numel = tensor.numel() // size if size else 0
    return numel if numel > 1 else 0
