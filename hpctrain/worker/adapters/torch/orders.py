"""The global batches of a loader over a map-style data set: which samples each has, and in which order they come."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import xxhash
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler

from hpctrain.common.errors import HpctrainError
from hpctrain.worker.adapters.torch.generators import OwnRandomNumbers, generators_in
from hpctrain.worker.comm import Communicator
from hpctrain.worker.data.sampling import batch_count, epoch_order, global_batches

# How many batches of a sampler are drawn, and sent to the other ranks, at once.
_AHEAD = 64


def order_of(loader: DataLoader[Any], comm: Communicator, *, seed: int) -> Order:
    """The order of a loader: hpctrain's own if it goes once through the data set, that of its sampler otherwise."""
    sampler: Any = loader.sampler
    # A sampler's class may be another's child, with an order of its own.
    once = type(sampler) is SequentialSampler or (_shuffles(sampler) and not sampler.replacement)
    if loader.batch_size and once and len(sampler) == len(sampler.data_source) == len(loader.dataset):  # type: ignore[arg-type]
        return _OwnOrder(loader, seed=seed)
    return _SamplerOrder(loader, comm, seed=seed)


def _shuffles(sampler: Any) -> bool:
    """Whether this is PyTorch's RandomSampler, or that of torchdata's StatefulDataLoader."""
    kind = type(sampler)
    return kind.__name__ == "RandomSampler" and kind.__module__.startswith(("torch.utils.data.", "torchdata."))


def refuse_divided(loader: DataLoader[Any]) -> None:
    """Refuse a loader whose sampler or data set gives one rank's part, as PyTorch's DistributedSampler does."""
    data = loader.dataset
    # One of a batch sampler that the script gave is not the loader's.
    inner = getattr(loader.batch_sampler, "sampler", None)
    for each in (loader.batch_sampler, inner, loader.sampler, data, getattr(data, "_distributed", None)):
        if _parts_of(each) != 1:
            kind = type(each).__name__
            raise HpctrainError(
                "HT-shard-divided-already",
                "the {kind} divides the samples over the ranks already, and ht.shard divides each batch",
                f"leave the {kind} out: every rank gives ht.shard the whole data, and each sample is seen once. Or "
                "leave ht.shard out: each rank's batches are then its own, and gradients are averaged as in "
                "DistributedDataParallel",
                kind=kind,
            )


def _parts_of(divided: Any) -> int:
    """How many ranks a sampler or data set is for: by the names of PyTorch, of ``datasets``, and of detectron2."""
    found = {name.lstrip("_"): each for name, each in getattr(divided, "__dict__", {}).items() if isinstance(each, int)}
    return found.get("num_replicas", found.get("world_size", 1)) if "rank" in found else 1


class _OwnOrder:
    """Each sample once an epoch, in the data set's order or in one that depends on the seed and the epoch alone."""

    # Whether a sampler of the script decides the order: an epoch that is continued has to be compared with what was
    # drawn of it before, and an index need be no number, nor come once.
    traced = False
    told: tuple[Any, ...] = ()

    def __init__(self, loader: DataLoader[Any], *, seed: int) -> None:
        assert loader.batch_size is not None
        self._shuffled = _shuffles(loader.sampler)
        self._samples, self._size, self._drop_last = len(loader.dataset), loader.batch_size, loader.drop_last  # type: ignore[arg-type]
        self._seed = seed
        self.identity = _identity(loader, seed if self._shuffled else -1)

    def __len__(self) -> int:
        return batch_count(self._samples, self._size, drop_last=self._drop_last)

    def batches(self, epoch: int) -> Iterator[list[Any]]:
        samples = self._samples
        order = epoch_order(samples, seed=self._seed, epoch=epoch) if self._shuffled else np.arange(samples)
        for batch in global_batches(order, self._size, drop_last=self._drop_last):
            yield batch.tolist()


class _SamplerOrder:
    """The batches of the script's own sampler or batch sampler, drawn on rank 0 for all ranks.

    Samplers that draw from the process's generators, or from one of their own, have an order that depends on ``seed``,
    on their own generator's seed and on the epoch, so that a resumed run has it again. Those that draw otherwise still
    have one order on all ranks, but a run that continues in the middle of an epoch is refused.
    """

    traced = True

    def __init__(self, loader: DataLoader[Any], comm: Communicator, *, seed: int) -> None:
        self._comm, self._seed = comm, seed
        comm.agreement()  # formed here, where all ranks are
        self._batches = loader.batch_sampler
        self.told = (loader.batch_sampler, getattr(loader.batch_sampler, "sampler", None))
        # A generator that is part of the data set belongs to its samples, not to their order.
        seen: dict[int, Any] = {}
        for _ in generators_in(loader.dataset, seen):
            pass
        self._held = list(generators_in([loader.batch_sampler, loader.sampler], seen))
        self.identity = _identity(loader, seed)

    def __len__(self) -> int:
        return len(self._batches)  # type: ignore[arg-type]

    def batches(self, epoch: int) -> Iterator[list[Any]]:
        numbers = OwnRandomNumbers(self._seed, epoch, held=self._held)
        drawn: Iterator[list[Any]] | None = None
        while True:
            chunk: list[list[Any]] = []
            failure: Exception | None = None
            if self._comm.rank == 0:
                try:
                    with numbers.in_use():
                        if drawn is None:
                            set_epoch(epoch, *self.told)
                            drawn = map(list, iter(self._batches))  # type: ignore[arg-type]
                        chunk = list(itertools.islice(drawn, _AHEAD))
                except Exception as error:
                    failure = error
            chunk, failed = self._comm.agreement().broadcast((chunk, repr(failure) if failure else ""))
            if failed:
                raise HpctrainError(
                    "HT-loader-sampler-failed",
                    "the loader's sampler failed on rank 0, which draws for all ranks: {reason}",
                    reason=failed,
                ) from failure
            yield from filter(None, chunk)
            if len(chunk) < _AHEAD:
                return


Order = _OwnOrder | _SamplerOrder


def set_epoch(epoch: int, *objects: Any) -> None:
    """Tell samplers and data sets that can be told which epoch begins."""
    for each in objects:
        if callable(method := getattr(each, "set_epoch", None)):
            method(epoch)


def _identity(loader: DataLoader[Any], seed: int) -> dict[str, Any]:
    samples = -1  # of a data set whose keys only the sampler knows
    with contextlib.suppress(TypeError):
        samples = len(loader.dataset)  # type: ignore[arg-type]
    size = loader.batch_size or -1
    identity: dict[str, Any] = {"samples": samples, "batch_size": size, "drop_last": loader.drop_last, "seed": seed}
    usual = type(loader.sampler) is SequentialSampler or _shuffles(loader.sampler)
    if not (usual and isinstance(loader.batch_sampler, BatchSampler)):
        identity["sampler"] = type(loader.sampler if loader.batch_size else loader.batch_sampler).__name__
    return identity


def next_trace(before: float, batch: list[Any]) -> float:
    """A number for the samples of an epoch up to this batch, equal on all ranks."""
    return float(xxhash.xxh3_64_intdigest(repr((before, batch)).encode()) >> 12)  # a float holds 52 bits exactly
