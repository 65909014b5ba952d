"""Divides streams over the ranks: data sets that are read one sample after the other, without indices.

Every rank reads the whole stream, and cuts it into the same global batches as one process. The ranks compare the length
of each batch and a few samples of an epoch's first: streams that differ are refused.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from hpctrain.common.errors import HpctrainError
from hpctrain.worker.adapters.data_ranks import DataPlace, data_place
from hpctrain.worker.adapters.same_data import summaries_of_few
from hpctrain.worker.adapters.torch.collation import Collation, joined
from hpctrain.worker.adapters.torch.generators import OwnRandomNumbers, SampleNumbers
from hpctrain.worker.adapters.torch.orders import set_epoch
from hpctrain.worker.adapters.torch.sources import (
    Place,
    Read,
    compare_loaders,
    compare_looks,
    order_not_kept,
    reading,
    salt_of,
)
from hpctrain.worker.comm import Communicator
from hpctrain.worker.data.sampling import batch_count


class StreamSource:
    """Reads a stream, on each rank the whole of it. Its attributes are those of :class:`MapSource`."""

    traced = False

    def __init__(self, loader: DataLoader[Any], comm: Communicator, *, seed: int, by_sample: bool) -> None:
        size = loader.batch_size
        assert size is not None
        self._comm = comm
        self._size, self._drop_last = size, loader.drop_last
        comm.agreement()  # formed here, where all ranks are
        self._data: Any = loader.dataset
        self.told = (loader.dataset,)
        self._reader = _Reader(loader, salt_of(comm, seed, loader), seed=seed, by_sample=by_sample)
        # Workers read parts of a stream, so their number decides what is in a batch.
        own = {"batch_size": size, "drop_last": loader.drop_last, "seed": seed, "workers": loader.num_workers}
        self.identity: dict[str, Any] = own
        compare_loaders(comm, loader, own)
        self.loader = reading(self._reader, loader)

    def __len__(self) -> int:
        return batch_count(len(self._data), self._size, drop_last=self._drop_last)

    def begin(self, place: Place, *, look: bool) -> Iterator[tuple[Any, Place]]:
        self._reader.place(place.epoch, place.batches, *data_place(self._comm))
        return self._follow(iter(self.loader), place)

    def _follow(self, batches: Iterator[Read], wanted: Place) -> Iterator[tuple[Any, Place]]:
        for number in itertools.count():
            read = next(batches, None)
            self._require_same_length(number, read.samples if read else 0)
            if read is None:
                break
            compare_looks(self._comm, read)
            # Workers know only at most how many batches are before theirs, and make somewhat more than are wanted.
            if number >= wanted.batches:
                assert read.part is not None
                yield joined(read.part, self._comm), Place(wanted.epoch, number + 1)
        if number < wanted.batches:
            raise order_not_kept(wanted, number)

    def _require_same_length(self, number: int, samples: int | None) -> None:
        """Refuse a batch of another length on another rank. Collective; raised on all ranks."""
        counts = self._comm.agreement().rows(np.array([float(samples or 0)]))[:, 0]
        if (counts != counts[0]).any():
            other = int((counts != counts[0]).argmax())
            raise HpctrainError(
                "HT-shard-different-data",
                "the ranks read different streams: batch {number} has {first} samples on rank 0 and {found} on rank "
                "{other}",
                "give ht.shard the whole stream on every rank, in one order: not divided by rank, and with shuffles "
                "that have a seed or draw from the process's generators",
                number=number,
                first=int(counts[0]),
                found=int(counts[other]),
                other=other,
            )


class _Reader(IterableDataset[Read]):
    """The global batches of a stream, in each worker those of its own part."""

    def __init__(self, loader: DataLoader[Any], salt: int, *, seed: int, by_sample: bool) -> None:
        assert loader.batch_size is not None
        self._size, self._drop_last, self._seed = loader.batch_size, loader.drop_last, seed
        self._persistent = loader.persistent_workers
        self._place = torch.zeros(4, dtype=torch.int64, device="cpu").share_memory_()
        self.data = _whole(loader.dataset)
        self._collation = Collation(loader.collate_fn, by_sample=by_sample)
        self._numbers = SampleNumbers(salt, [], loader.collate_fn)

    def place(self, epoch: int, first: int, rank: int, ranks: int) -> None:
        """Make the next ``iter()``, in any process, begin at that batch of an epoch, as that rank."""
        place = torch.tensor([epoch, first, rank, ranks], device="cpu")
        if self._persistent:  # they keep their copy of this object
            self._place[:] = place
        else:  # workers of another iterator may not have read theirs yet
            self._place = place

    def __iter__(self) -> Iterator[Read]:
        # Not a generator: the place is the one at the moment of the call.
        epoch, *rest = self._place.tolist()
        _begin_epoch(self.data, epoch)
        return self._read(epoch, *rest)

    def _read(self, epoch: int, first: int, rank: int, ranks: int) -> Iterator[Read]:
        worker = get_worker_info()
        number, workers = (worker.id, worker.num_workers) if worker else (0, 1)
        # Equal on all ranks, for a stream that shuffles with the process's generators.
        numbers = OwnRandomNumbers(self._seed, epoch, number)
        with numbers.in_use():
            stream = iter(self.data)
        for turn in itertools.count():
            with numbers.in_use():
                batch = list(itertools.islice(stream, self._size))
            if not batch or (self._drop_last and len(batch) < self._size):
                return
            # Workers take turns, and those whose part has ended are left out: this batch is at most that far behind.
            place, part = turn * workers + number, None
            # Before a collate_fn that changes its samples.
            looks = summaries_of_few(batch) if place == 0 else {}
            if place >= first:
                with self._numbers.in_use():
                    self._numbers.of_batch(epoch, place)
                    own = self._collation.fetched(len(batch), DataPlace(rank, ranks))
                    part = self._collation(batch[own], len(batch), DataPlace(rank, ranks))
            yield Read(part, Place(epoch, place + 1), len(batch), looks)


def _whole(data: Any) -> Any:
    """A stream as each rank reads it: WebDataset's otherwise asks on several ranks for what divides its files."""
    if not _is_webdataset(data):
        return data
    from webdataset.shardlists import single_node_only

    own = copy.copy(data)
    own.pipeline = [stage for stage in data.pipeline if stage is not single_node_only]
    return own


def _is_webdataset(data: Any) -> bool:
    return any(kind.__module__ == "webdataset.pipeline" for kind in type(data).__mro__)


def _begin_epoch(data: Any, epoch: int) -> None:
    """Tell a stream which epoch begins: by ``set_epoch``, or webdataset's shuffles by the number that they count up."""
    set_epoch(epoch, data)
    for stage in data.pipeline if _is_webdataset(data) else ():
        if isinstance(getattr(stage, "epoch", None), int):
            stage.epoch = epoch - 1
