"""Compares what the ranks give ``ht.shard``: the loader's settings, the data set's length and what it is a part of."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import xxhash
from torch.utils.data import DataLoader, Subset

from hpctrain.worker.adapters.same_data import RANDOM, WHOLE, Sample, compare, summarise
from hpctrain.worker.comm import Communicator

_SEEDED = (
    "random_split(data, lengths, generator=torch.Generator().manual_seed(0)), or one seed on all ranks before the "
    "indices are drawn"
)
_ALIKE = "give DataLoader and ht.shard the same settings on every rank"


def compare_loaders(comm: Communicator, loader: DataLoader[Any], identity: Mapping[str, Any]) -> None:
    """Refuse loaders that differ between ranks. Collective.

    Args:
        identity: what decides which samples are in a batch.

    Raises:
        HpctrainError: names what differs, with the values of two ranks; raised on all ranks.
    """
    if comm.size == 1:
        return
    data: Any = loader.dataset
    samples = len(data) if hasattr(data, "__len__") else 0
    facts = {"the number of samples": (str(samples), WHOLE)}
    facts |= {f"the indices of {name}": (text, _SEEDED) for name, text in _indices(data)}
    settings: dict[str, Any] = {
        "the kind of data set": type(data).__name__,
        "the sampler": type(loader.sampler).__name__,
    }
    # The workers decide the order of a stream, and where a collate_fn is tried.
    settings |= {"num_workers": loader.num_workers, "prefetch_factor": loader.prefetch_factor}
    settings |= {name: value for name, value in identity.items() if name not in ("samples", "sampler", "workers")}
    facts |= {name: (str(value), _ALIKE) for name, value in settings.items()}
    compare(comm, facts)


def look_at(fetch: Callable[[], Any]) -> Sample:
    """What a sample looks like; None for one that cannot be fetched, which is left to the training."""
    with contextlib.suppress(Exception):
        first, second = summarise(fetch()), summarise(fetch())
        # What its data set draws with generators that nobody can seed differs between two fetches.
        return {name: RANDOM if second.get(name, RANDOM).differs(leaf) else leaf for name, leaf in first.items()}
    return None


def _indices(data: Any, name: str = "Subset") -> Iterator[tuple[str, str]]:
    """The indices of a Subset, and of the one within it, as texts by name."""
    if isinstance(data, Subset):
        indices = np.asarray(data.indices)
        shown = ", ".join(map(str, indices[:6].tolist())) + (", …" if len(indices) > 6 else "")
        yield name, f"[{shown}], hash {xxhash.xxh3_64_hexdigest(indices.tobytes())[:8]}"
        yield from _indices(data.dataset, f"{name}.dataset")
