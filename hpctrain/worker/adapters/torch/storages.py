"""Facts about tensor storages, kept as long as the storage is in use."""

from __future__ import annotations

from collections.abc import Set
from typing import Generic, TypeVar

import torch
from torch.multiprocessing.reductions import StorageWeakRef

T = TypeVar("T")


class Storages(Generic[T]):
    """Facts about storages; one storage may have several."""

    def __init__(self) -> None:
        # Addresses identify storages, because a weak reference keeps an address from being used again.
        self._facts: dict[int, tuple[StorageWeakRef, set[T]]] = {}
        self._limit = 256

    def add(self, tensor: torch.Tensor, fact: T) -> None:
        """Record a fact about a tensor's storage, if it has one."""
        storage = _storage(tensor)
        if storage is None:
            return
        reference = StorageWeakRef(storage)
        _, facts = self._facts.setdefault(reference.cdata, (reference, set()))
        facts.add(fact)
        if len(self._facts) > self._limit:
            self._facts = {key: entry for key, entry in self._facts.items() if not entry[0].expired()}
            self._limit = max(256, 2 * len(self._facts))

    def of(self, tensor: torch.Tensor) -> Set[T]:
        """The facts about a tensor's storage."""
        storage = _storage(tensor)
        entry = None if storage is None else self._facts.get(storage._cdata)
        return entry[1] if entry else set()


def _storage(tensor: torch.Tensor) -> torch.UntypedStorage | None:
    try:
        return tensor.untyped_storage()
    except (NotImplementedError, RuntimeError):
        return None  # a sparse tensor, or one within a function transform
