"""The global batches of a loader over a map-style data set: which samples each has, and in which order they come."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from typing import Any, Protocol

import numpy as np
import xxhash
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler
from torch.utils.weak import WeakIdKeyDictionary

from hpctrain.common.errors import HpctrainError
from hpctrain.worker.adapters.data_ranks import data_place
from hpctrain.worker.adapters.torch.generators import OwnRandomNumbers, generators_in
from hpctrain.worker.comm import Communicator
from hpctrain.worker.comm.agreement import agreement
from hpctrain.worker.data.sampling import batch_count, epoch_order, global_batches

# How many batches of a sampler are drawn at once: without a length, and at most.
_AHEAD, _MOST = 64, 4096
# The epoch that an object then had.
_told = WeakIdKeyDictionary()


class Order(Protocol):
    """The global batches of an epoch.

    Attributes:
        identity: what decides, together with the epoch, which samples are in a global batch.
        traced: whether the order of an epoch that is continued has to be compared with what was drawn of it before.
        divided: whether the batches are a rank's own, which the script's sampler has divided.
        once: whether the indices are numbers, each of which comes once an epoch.
        told: the script's objects whose order depends on the epoch that they are told.
    """

    identity: dict[str, Any]
    traced: bool
    divided: bool
    once: bool
    told: tuple[Any, ...]

    def __len__(self) -> int: ...

    def batches(self, epoch: int) -> Iterator[tuple[list[Any], Any]]:
        """The indices of each global batch of an epoch, and what its trace depends on."""


def order_of(loader: DataLoader[Any], comm: Communicator, *, seed: int) -> Order:
    """The order of a loader: hpctrain's own if it goes once through the data set, that of its sampler otherwise.

    Raises:
        HpctrainError: the loader makes no batches, or its sampler divides the samples over other ranks.
    """
    if loader.batch_sampler is None:
        raise HpctrainError(
            "HT-shard-no-batch-size",
            "ht.shard needs a loader with a batch_size",
            "DataLoader(dataset, batch_size=…)",
        )
    # One of a batch sampler that the script gave is not the loader's.
    inner = getattr(loader.batch_sampler, "sampler", None)
    if divides := divided_by_itself(loader.batch_sampler, loader.sampler, inner):
        return _DividedOrder(loader, comm, divides, seed=seed)
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


def divided_by_itself(*objects: Any) -> Any:
    """The first of these that says, as PyTorch's DistributedSampler does, that it is one rank's part of several."""
    return next((each for each in objects if _part_of(each)[1] != 1), None)


def _part_of(divided: Any) -> tuple[int, int]:
    """Which part of how many a sampler or data set is: by the names of PyTorch, of ``datasets``, and of detectron2."""
    found = {name.lstrip("_"): each for name, each in getattr(divided, "__dict__", {}).items() if isinstance(each, int)}
    return found.get("rank", 0), found.get("num_replicas", found.get("world_size", 1)) if "rank" in found else 1


class _OwnOrder:
    """Each sample once an epoch, in the data set's order or in one that depends on the seed and the epoch alone."""

    traced = divided = False
    once = True
    told = ()

    def __init__(self, loader: DataLoader[Any], *, seed: int) -> None:
        assert loader.batch_size is not None
        self._shuffled = _shuffles(loader.sampler)
        self._samples, self._size, self._drop_last = len(loader.dataset), loader.batch_size, loader.drop_last  # type: ignore[arg-type]
        self._seed = seed
        self.identity = _identity(loader, seed if self._shuffled else -1)

    def __len__(self) -> int:
        return batch_count(self._samples, self._size, drop_last=self._drop_last)

    def batches(self, epoch: int) -> Iterator[tuple[list[Any], Any]]:
        samples = self._samples
        order = epoch_order(samples, seed=self._seed, epoch=epoch) if self._shuffled else np.arange(samples)
        for batch in global_batches(order, self._size, drop_last=self._drop_last):
            yield batch.tolist(), None


class _SamplerOrder:
    """The batches of the script's own sampler or batch sampler, drawn on rank 0 for all ranks.

    Samplers that draw from the process's generators, or from one of their own, have an order that depends on ``seed``,
    on their own generator's seed and on the epoch, so that a resumed run has it again. Those that draw otherwise still
    have one order on all ranks, but a run that continues in the middle of an epoch is refused.
    """

    traced = True
    divided = once = False

    def __init__(self, loader: DataLoader[Any], comm: Communicator, *, seed: int) -> None:
        self._comm, self._seed = comm, seed
        agreement(comm)  # formed here, where all ranks are
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

    def batches(self, epoch: int) -> Iterator[tuple[list[Any], Any]]:
        for batch in filter(None, self._agreed(epoch)):
            yield batch, batch

    def _agreed(self, epoch: int) -> Iterator[list[Any]]:
        """The global batches, on all ranks."""
        try:
            # One more than there are, so that one message says that they have ended.
            count = min(len(self) + 1, _MOST)
        except TypeError:
            count = _AHEAD
        numbers = OwnRandomNumbers(self._seed, epoch, held=self._held)
        drawn: Iterator[list[Any]] | None = None
        while True:
            chunk: list[list[Any]] = []
            failure: Exception | None = None
            if self._comm.rank == 0:
                try:
                    with numbers.in_use():
                        drawn = drawn or self._begin(epoch)
                        chunk = list(itertools.islice(drawn, count))
                except Exception as error:
                    failure = error
            sent = chunk, repr(failure) if failure else "", numbers.seed
            chunk, failed, numbers.seed = agreement(self._comm).broadcast(sent)
            if failed:
                raise HpctrainError(
                    "HT-loader-sampler-failed",
                    "the loader's sampler failed on rank 0, which draws for all ranks: {reason}",
                    reason=failed,
                ) from failure
            yield from chunk
            if len(chunk) < count:
                return

    def _begin(self, epoch: int) -> Iterator[list[Any]]:
        set_epoch(epoch, *self.told)
        return map(list, iter(self._batches))  # type: ignore[arg-type]


class _DividedOrder:
    """The batches of a sampler that divides the samples over the ranks itself, as they are on each rank.

    Its batches have the same number of samples on every rank.
    """

    traced = divided = True
    once = False

    def __init__(self, loader: DataLoader[Any], comm: Communicator, sampler: Any, *, seed: int) -> None:
        self._comm = comm
        agreement(comm)
        self._batches, self._sampler = loader.batch_sampler, sampler
        self.told = (loader.batch_sampler, sampler)
        require_place(comm, sampler)
        try:
            self._length = len(self)
        except TypeError:
            raise _endless(sampler) from None
        self.identity = _identity(loader, seed) | {"ranks": data_place(comm).ranks}

    def __len__(self) -> int:
        return len(self._batches)  # type: ignore[arg-type]

    def batches(self, epoch: int) -> Iterator[tuple[list[Any], Any]]:
        set_epoch(epoch, *self.told)
        batches = [list(batch) for batch in itertools.islice(self._batches, self._length + 1)]  # type: ignore[arg-type]
        if len(batches) > self._length:
            raise _endless(self._sampler)
        found = agreement(self._comm).rows(np.array([len(batches), _digest(list(map(len, batches))), _digest(batches)]))
        if (found[:, :2] != found[0, :2]).any():
            raise HpctrainError(
                "HT-shard-uneven-sampler",
                "{sampler} has other numbers of samples on some ranks than on others ({batches} batches on each rank)",
                "leave the sampler out: ht.shard divides each batch over the ranks",
                sampler=type(self._sampler).__name__,
                batches=[int(row[0]) for row in found],
            )
        order = _digest(found.tolist())
        for batch in filter(None, batches):
            yield batch, order


def _endless(sampler: Any) -> HpctrainError:
    return HpctrainError(
        "HT-shard-endless-sampler",
        "the {sampler} divides the samples itself, and has no end, or none at its length",
        "make it for rank 0 of 1: ht.shard then divides each of its batches",
        sampler=type(sampler).__name__,
    )


def require_place(comm: Communicator, divided: Any) -> None:
    """Refuse a sampler or data set that is the part of another rank, or of another number of ranks.

    Raises:
        HpctrainError: says which.
    """
    place = data_place(comm)
    rank, ranks = _part_of(divided)
    if (rank, ranks) != place:
        raise HpctrainError(
            "HT-shard-other-part",
            "{kind} gives the part of rank {rank} of {ranks}, and this is rank {own_rank} of the {own_ranks} that "
            "divide the samples",
            f"make it for rank {place.rank} of {place.ranks}, or leave it out: ht.shard divides the samples",
            kind=type(divided).__name__,
            rank=rank,
            ranks=ranks,
            own_rank=place.rank,
            own_ranks=place.ranks,
        )


def set_epoch(epoch: int, *objects: Any) -> None:
    """Tell samplers and data sets that can be told which epoch begins."""
    for each in objects:
        if callable(method := getattr(each, "set_epoch", None)):
            method(epoch)
            _told[each] = getattr(each, "epoch", None)


def epoch_said_to(*objects: Any) -> int | None:
    """The epoch that the script has told one of these since :func:`set_epoch`; None if it has not."""
    for each in objects:
        epoch = getattr(each, "epoch", None) if callable(getattr(each, "set_epoch", None)) else None
        if isinstance(epoch, int) and epoch != _told.get(each):
            return epoch
    return None


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


def trace_of(before: tuple[float, ...], drawn: Any) -> tuple[float, ...]:
    """A number for the samples of an epoch up to this batch, equal on all ranks."""
    return (_digest((before, drawn)),)


def _digest(value: Any) -> float:
    return float(xxhash.xxh3_64_intdigest(repr(value).encode()) >> 12)  # a float holds 52 bits exactly
