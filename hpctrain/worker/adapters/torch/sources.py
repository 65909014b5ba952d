"""What a sharded loader draws batches from, where in an epoch it is, and that all ranks were given the same."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
import xxhash
from torch.utils.data import DataLoader, Dataset, Subset, get_worker_info

from hpctrain.common.errors import HpctrainError
from hpctrain.worker.adapters.data_ranks import DataPlace, data_place
from hpctrain.worker.adapters.same_data import (
    RANDOM,
    WHOLE,
    Sample,
    compare,
    compare_samples,
    sample_indices,
    summarise,
)
from hpctrain.worker.adapters.torch.collation import Collation, Part, joined
from hpctrain.worker.adapters.torch.generators import OwnRandomNumbers, SampleNumbers, generators_in, is_plain
from hpctrain.worker.adapters.torch.orders import Order, next_trace, order_of
from hpctrain.worker.comm import Communicator

T = TypeVar("T")


class Place(NamedTuple):
    """A place in the order of a loader's samples: an epoch, and how many of its global batches come before.

    ``trace`` is a number that says which samples those had; 0 where the other attributes decide that.
    """

    epoch: int = 0
    batches: int = 0
    trace: float = 0.0


class Read(NamedTuple):
    """A global batch, as a worker hands it on, with the place in the order behind it."""

    # None if the batch is passed over.
    part: Part | None
    after: Place
    # How many samples it has; None where that is known without reading.
    samples: int | None = None
    # What a few samples look like, by their indices, for the ranks to compare.
    looks: Mapping[Any, Sample] = {}


class MapSource:
    """Reads a map-style data set, in the order of its loader or of hpctrain's own.

    Attributes:
        loader: a loader of this rank's parts.
        identity: what decides, together with the epoch, which samples are in a global batch.
        traced: whether a :class:`Place` has a trace.
        told: the script's objects whose order depends on the epoch that they are told.
    """

    def __init__(self, loader: DataLoader[Any], comm: Communicator, *, seed: int, by_sample: bool) -> None:
        self._comm = comm
        self._order: Order = order_of(loader, comm, seed=seed)
        self.identity, self.traced, self.told = self._order.identity, self._order.traced, self._order.told
        compare_loaders(comm, loader, self.identity)
        collation = Collation(loader.collate_fn, by_sample=by_sample)
        numbers = SampleNumbers(salt_of(comm, seed, loader), loader.dataset, loader.collate_fn)
        self._wanted = _WantedBatches()
        self._samples = max(0, self.identity["samples"]) if comm.size > 1 else 0
        self.loader = reading(_Batches(loader.dataset, collation, numbers), loader, sampler=self._wanted)

    def __len__(self) -> int:
        return len(self._order)

    def begin(self, place: Place, *, look: bool) -> Iterator[tuple[Any, Place]]:
        """Begin to read an epoch from this place on: each batch, as the script gets it, and the place behind it.

        Args:
            look: whether the ranks compare a few samples.
        """
        # The loader's workers read ahead of the training.
        self._wanted.batches = self._batches(place, sample_indices(self._samples) if look else ())
        return self._follow(iter(self.loader))

    def _follow(self, batches: Iterator[Read]) -> Iterator[tuple[Any, Place]]:
        for read in batches:
            compare_looks(self._comm, read)
            assert read.part is not None
            yield joined(read.part, self._comm), read.after

    def _batches(self, place: Place, looks: Sequence[int]) -> Iterator[_Wanted]:
        """The batches from a place on; the first of them with samples to look at."""
        at, samples = Place(place.epoch), 0
        for indices in self._order.batches(place.epoch):
            if at.batches == place.batches:
                require_same_order(at, place)
            after = Place(at.epoch, at.batches + 1, next_trace(at.trace, indices) if self.traced else 0.0)
            # A sampler may give a sample twice.
            keys = range(samples, samples + len(indices)) if self.traced else indices
            if at.batches >= place.batches:
                yield _Wanted(indices, keys, data_place(self._comm), after, looks)
                looks = ()
            at, samples = after, samples + len(indices)
        if at.batches <= place.batches:
            require_same_order(at, place)


def compare_looks(comm: Communicator, read: Read) -> None:
    """Refuse samples that look different on another rank. Collective where there are some to look at."""
    if read.looks and comm.size > 1:
        compare_samples(comm.agreement().gather(read.looks))


class _Wanted(NamedTuple):
    """A global batch that is to be read, with the place in the order behind it."""

    indices: list[Any]
    # What random numbers depend on: the index, or the sample's place in an epoch that may have it twice.
    keys: Sequence[int]
    place: DataPlace
    after: Place
    # The indices of samples that the ranks compare.
    looks: Sequence[int]


class _WantedBatches(torch.utils.data.Sampler[_Wanted]):
    """The batches of an epoch, from where it begins."""

    batches: Iterator[_Wanted] = iter(())

    def __iter__(self) -> Iterator[_Wanted]:
        return self.batches


class _Batches(Dataset[Read]):
    """This rank's part of the global batches of the script's data set, by what is wanted of them."""

    def __init__(self, data: Any, collation: Collation, numbers: SampleNumbers) -> None:
        self.data = data
        self._collation, self._numbers = collation, numbers
        inner = data
        while isinstance(inner, Subset):
            inner = inner.dataset
        # Such a data set fetches the samples of a batch at once.
        self._at_once = bool(getattr(inner, "__getitems__", None))
        # Shared with worker processes, which begin anew in each epoch.
        self._draws = torch.zeros(1, dtype=torch.bool, device="cpu").share_memory_()

    def __getitem__(self, wanted: _Wanted) -> Read:
        looks = {index: self._look_at(index) for index in wanted.looks}
        return Read(self._drawn(wanted), wanted.after, looks=looks)

    def _drawn(self, wanted: _Wanted) -> Part:
        """Seeding the generators for each sample takes time, so a batch is read again where that has drawn numbers."""
        if not self._draws:
            part, drawn = self._numbers.drawn_by(lambda: self._part(wanted, self._read))
            if not drawn:
                return part
            self._draws[0] = True
        with self._numbers.in_use():
            return self._part(wanted, self._read_seeded)

    def _part(self, wanted: _Wanted, read: Callable[[_Wanted, slice], Any]) -> Part:
        total = len(wanted.indices)
        samples = read(wanted, self._collation.fetched(total, wanted.place))
        return self._collation(samples, total, wanted.place)

    def _look_at(self, index: int) -> Sample:
        """What a sample looks like; None for one that cannot be fetched, which is left to the training."""
        summaries = []
        with self._numbers.in_use(), contextlib.suppress(Exception):
            for _ in range(2):
                self._numbers.of_sample(0, index)
                summaries.append(summarise(self.data[index]))
        if len(summaries) < 2:
            return None
        first, second = summaries
        # What a data set draws with generators that nobody can seed differs between two fetches.
        return {name: RANDOM if second.get(name, RANDOM).differs(leaf) else leaf for name, leaf in first.items()}

    def _read(self, wanted: _Wanted, part: slice) -> Any:
        indices = wanted.indices[part]
        return self.data.__getitems__(indices) if self._at_once else [self.data[index] for index in indices]

    def _read_seeded(self, wanted: _Wanted, part: slice) -> Any:
        if self._at_once and not self._collation.by_sample:
            self._numbers.of_batch(wanted.after.epoch, wanted.after.batches)
            return self._read(wanted, part)
        samples = []
        for index, key in zip(wanted.indices[part], wanted.keys[part], strict=True):
            self._numbers.of_sample(wanted.after.epoch, key)
            samples.append(self.data[index])
        self._numbers.of_batch(wanted.after.epoch, wanted.after.batches)  # for the collate_fn
        return samples


def salt_of(comm: Communicator, seed: int, loader: DataLoader[Any]) -> int:
    """What the random numbers of a loader's samples depend on, the same on all ranks. Collective."""
    held = [] if is_plain(loader.dataset) else list(generators_in([loader.dataset, loader.collate_fn], {}))
    return comm.broadcast_object(OwnRandomNumbers(seed, held=held).seed)


def reading(data: Dataset[Read], loader: DataLoader[Any], **settings: Any) -> DataLoader[Any]:
    """A loader of what a data set has made already, that reads as another one does. ``data.data`` is that one's."""
    begin = loader.worker_init_fn
    return DataLoader(
        data,
        batch_size=None,
        collate_fn=_as_it_is,
        num_workers=loader.num_workers,
        pin_memory=loader.pin_memory,
        timeout=loader.timeout,
        worker_init_fn=functools.partial(_begin_worker, begin) if begin else None,
        multiprocessing_context=loader.multiprocessing_context,
        generator=loader.generator,
        prefetch_factor=loader.prefetch_factor,
        persistent_workers=loader.persistent_workers,
        **settings,
    )


def _as_it_is(made: T) -> T:
    return made


def _begin_worker(begin: Callable[[int], None], worker: int) -> None:
    """Call the ``worker_init_fn`` of a script, which may look for its data set in the worker's information."""
    info: Any = get_worker_info()
    object.__setattr__(info, "dataset", info.dataset.data)  # the object itself refuses assignments
    begin(worker)


def require_same_order(found: Place, wanted: Place) -> None:
    """Refuse to continue an epoch whose samples until then are not those that were drawn before."""
    if wanted.trace and (found.batches, found.trace) != (wanted.batches, wanted.trace):
        raise order_not_kept(wanted, found.batches)


def order_not_kept(wanted: Place, batches: int) -> HpctrainError:
    """The error of an epoch that has another order than before; ``batches`` were found until there."""
    return HpctrainError(
        "HT-loader-order-not-kept",
        "the loader's state is after {wanted} batches of epoch {epoch}, and this run's first {batches} batches of that "
        "epoch have other samples: some would come twice, and others not at all",
        "let the order depend on seeds alone, of the process's generators or of one that the sampler holds; or begin "
        f"an epoch: set_epoch({wanted.epoch + 1})",
        wanted=wanted.batches,
        epoch=wanted.epoch,
        batches=batches,
    )


_SEEDED = (
    "random_split(data, lengths, generator=torch.Generator().manual_seed(0)), or one seed on all ranks before the "
    "indices are drawn"
)
_ALIKE = "give DataLoader and ht.shard the same settings on every rank"


def compare_loaders(comm: Communicator, loader: DataLoader[Any], identity: Mapping[str, Any]) -> None:
    """Refuse loaders that differ between ranks, or whose batches have other samples (``identity``). Collective."""
    if comm.size == 1:
        return
    data: Any = loader.dataset
    samples = len(data) if hasattr(data, "__len__") else 0
    facts = {"the number of samples": (str(samples), WHOLE)}
    name, inner = "Subset", data
    while isinstance(inner, Subset):
        facts[f"the indices of {name}"] = (
            f"hash {xxhash.xxh3_64_hexdigest(np.asarray(inner.indices).tobytes())}",
            _SEEDED,
        )
        name, inner = f"{name}.dataset", inner.dataset
    settings: dict[str, Any] = {
        "the kind of data set": type(data).__name__,
        "the sampler": type(loader.sampler).__name__,
        # The workers decide the order of a stream, and where a collate_fn is tried.
        "num_workers": loader.num_workers,
        "prefetch_factor": loader.prefetch_factor,
    }
    settings |= {name: value for name, value in identity.items() if name not in ("samples", "sampler", "workers")}
    facts |= {name: (str(value), _ALIKE) for name, value in settings.items()}
    compare(comm, facts)
