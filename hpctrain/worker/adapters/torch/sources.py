"""What a sharded loader draws batches from, and where in an epoch it is."""

from __future__ import annotations

import itertools
import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from torch.utils.data import DataLoader, Subset, get_worker_info

from hpctrain.common.errors import HpctrainError
from hpctrain.worker.adapters.data_ranks import DataPlace, data_place
from hpctrain.worker.adapters.same_data import Sample
from hpctrain.worker.adapters.torch.collation import Collation, Part, joined
from hpctrain.worker.adapters.torch.generators import OwnRandomNumbers, SampleNumbers, generators_in, is_plain
from hpctrain.worker.adapters.torch.orders import Order, order_of, trace_of
from hpctrain.worker.adapters.torch.same_data import compare_loaders, look_at
from hpctrain.worker.comm import Communicator

T = TypeVar("T")


class Place(NamedTuple):
    """A place in the order of a loader's samples.

    Attributes:
        epoch: the epoch.
        batches: how many of its global batches come before.
        trace: numbers that say which samples those had; empty where the other attributes decide that.
    """

    epoch: int = 0
    batches: int = 0
    trace: tuple[float, ...] = ()


class Drawn(NamedTuple):
    """A global batch, as the script gets it, and the place behind it."""

    batch: Any
    after: Place


class Source(Protocol):
    """Draws the batches of a loader.

    Attributes:
        loader: a loader of this rank's parts.
        identity: what decides, together with the epoch, which samples are in a global batch.
        traced: whether a :class:`Place` has a trace.
        told: the script's objects whose order depends on the epoch that they are told.
    """

    loader: DataLoader[Any]
    identity: dict[str, Any]
    traced: bool
    told: tuple[Any, ...]

    def __len__(self) -> int: ...

    def begin(self, place: Place) -> Iterator[Drawn]:
        """Begin to read an epoch, from this place on."""


class MapSource:
    """Reads a map-style data set, in the order of its loader or of hpctrain's own."""

    def __init__(self, loader: DataLoader[Any], comm: Communicator, *, seed: int, by_sample: bool) -> None:
        self._comm = comm
        self._order: Order = order_of(loader, comm, seed=seed)
        self.identity, self.traced, self.told = self._order.identity, self._order.traced, self._order.told
        collation = Collation(loader.collate_fn, by_sample=by_sample)
        numbers = SampleNumbers(salt_of(comm, seed, loader), loader.dataset, loader.collate_fn)
        batches = _Batches(loader.dataset, collation, numbers)
        compare_loaders(comm, loader, self.identity, lambda indices: looks(loader, batches, indices))
        self._wanted = _WantedBatches()
        self.loader: DataLoader[Any] = DataLoader(
            batches,
            batch_size=None,
            sampler=self._wanted,
            collate_fn=as_it_is,
            **settings_of(loader),
        )

    def __len__(self) -> int:
        return len(self._order)

    def begin(self, place: Place) -> Iterator[Drawn]:
        # The loader's workers read ahead of the training.
        ahead, batches = itertools.tee(self._batches(place))
        self._wanted.batches = (wanted for wanted, _ in ahead)
        return self._follow(iter(self.loader), batches)

    def _batches(self, place: Place) -> Iterator[tuple[_Wanted, Place]]:
        """The batches from a place on, each with the place behind it."""
        at, samples = Place(place.epoch), 0
        for indices, drawn in self._order.batches(place.epoch):
            if at.batches == place.batches:
                require_same_order(at, place)
            trace = trace_of(at.trace, drawn) if self.traced else ()
            keys = indices if self._order.once else range(samples, samples + len(indices))
            wanted = _Wanted(place.epoch, at.batches, indices, keys, data_place(self._comm))
            at, samples = Place(at.epoch, at.batches + 1, trace), samples + len(indices)
            if at.batches > place.batches:
                yield wanted, at
        if at.batches <= place.batches:
            require_same_order(at, place)

    def _follow(self, parts: Iterator[Part], batches: Iterator[tuple[_Wanted, Place]]) -> Iterator[Drawn]:
        for part, (_, after) in zip(parts, batches, strict=True):
            yield Drawn(joined(part, self._comm), after)


class _Wanted(NamedTuple):
    """A global batch that is to be read.

    Attributes:
        epoch: the epoch.
        number: the batch's place in it.
        indices: its samples.
        keys: what their random numbers depend on: the index, or the sample's place in an epoch that has it twice.
        place: which of the samples are this rank's.
    """

    epoch: int
    number: int
    indices: list[Any]
    keys: Sequence[int]
    place: DataPlace


class _WantedBatches(torch.utils.data.Sampler[_Wanted]):
    """The batches of an epoch, from where it begins."""

    batches: Iterator[_Wanted] = iter(())

    def __iter__(self) -> Iterator[_Wanted]:
        return self.batches


class _Batches(torch.utils.data.Dataset[Part]):
    """This rank's part of the global batches of a data set, by what is wanted of them.

    Attributes:
        data: the data set of the script.
    """

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

    def __getitem__(self, wanted: _Wanted) -> Part:
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

    def look(self, index: int) -> Sample:
        """What a sample looks like."""

        def fetch() -> Any:
            self._numbers.of_sample(0, index)
            return self.data[index]

        with self._numbers.in_use():
            return look_at(fetch)

    def _read(self, wanted: _Wanted, part: slice) -> Any:
        indices = wanted.indices[part]
        return self.data.__getitems__(indices) if self._at_once else [self.data[index] for index in indices]

    def _read_seeded(self, wanted: _Wanted, part: slice) -> Any:
        if self._at_once and not self._collation.by_sample:
            self._numbers.of_batch(wanted.epoch, wanted.number)
            return self._read(wanted, part)
        samples = []
        for index, key in zip(wanted.indices[part], wanted.keys[part], strict=True):
            self._numbers.of_sample(wanted.epoch, key)
            samples.append(self.data[index])
        self._numbers.of_batch(wanted.epoch, wanted.number)  # for the collate_fn
        return samples


class _Looks(torch.utils.data.Dataset[Sample]):
    """What the samples of a data set look like."""

    def __init__(self, batches: _Batches) -> None:
        self.data = batches.data
        self._batches = batches

    def __getitem__(self, index: int) -> Sample:
        return self._batches.look(index)


def looks(loader: DataLoader[Any], batches: _Batches, indices: list[int]) -> dict[int, Sample]:
    """What samples look like, fetched in a worker process if the loader has some: they may open files."""
    settings: dict[str, Any] = {}
    if loader.num_workers and not is_plain(loader.dataset):
        # Workers that are not forked would import PyTorch again, which takes seconds.
        if (loader.multiprocessing_context or multiprocessing).get_start_method() != "fork":
            return {}
        settings = settings_of(loader) | {"num_workers": 1, "pin_memory": False, "persistent_workers": False}
    settings["generator"] = torch.Generator(device="cpu")
    found = DataLoader(_Looks(batches), batch_size=None, sampler=indices, collate_fn=as_it_is, **settings)
    return dict(zip(indices, found, strict=True))


def salt_of(comm: Communicator, seed: int, loader: DataLoader[Any]) -> int:
    """What the random numbers of a loader's samples depend on, the same on all ranks. Collective."""
    held = [] if is_plain(loader.dataset) else list(generators_in([loader.dataset, loader.collate_fn], {}))
    return comm.broadcast_object(OwnRandomNumbers(seed, held=held).seed)


def as_it_is(made: T) -> T:
    """The ``collate_fn`` of a loader whose data set has made what it yields."""
    return made


def settings_of(loader: DataLoader[Any]) -> dict[str, Any]:
    """The settings of a loader that say how it reads, not what. Its data set is read by one with it as ``data``."""
    return {
        "num_workers": loader.num_workers,
        "pin_memory": loader.pin_memory,
        "timeout": loader.timeout,
        "worker_init_fn": WorkerBegin(loader.worker_init_fn) if loader.worker_init_fn else None,
        "multiprocessing_context": loader.multiprocessing_context,
        "generator": loader.generator,
        "prefetch_factor": loader.prefetch_factor,
        "persistent_workers": loader.persistent_workers,
    }


class WorkerBegin:
    """The ``worker_init_fn`` of a script, which may look for its data set in the worker's information."""

    def __init__(self, begin: Callable[[int], None]) -> None:
        self._begin = begin

    def __call__(self, worker: int) -> None:
        info: Any = get_worker_info()
        object.__setattr__(info, "dataset", info.dataset.data)  # the object itself refuses assignments
        self._begin(worker)


def require_same_order(found: Place, wanted: Place) -> None:
    """Refuse to continue an epoch whose samples until then are not those that were drawn before.

    Raises:
        HpctrainError: says where.
    """
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
