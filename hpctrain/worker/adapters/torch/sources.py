"""What a sharded loader draws batches from, and where in an epoch it is."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple, Protocol

import torch
from torch.utils.data import DataLoader

from hpctrain.common.errors import HpctrainError
from hpctrain.worker.adapters.data_ranks import data_place, mesh_of
from hpctrain.worker.adapters.torch.orders import Order, Part, order_of, trace_of
from hpctrain.worker.adapters.torch.reducer import syncing
from hpctrain.worker.adapters.torch.same_data import compare_loaders
from hpctrain.worker.adapters.torch.weights import SPARE_SAMPLES
from hpctrain.worker.comm import Communicator


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
    """This rank's part of a global batch.

    Attributes:
        batch: what the script is given.
        total: the samples of the global batch.
        own: how many of them are this rank's own.
        after: the place behind it.
    """

    batch: Any
    total: int
    own: int
    after: Place


class Source(Protocol):
    """Draws the batches of a loader.

    Attributes:
        loader: a loader of this rank's parts.
        identity: what decides, together with the epoch, which samples are in a global batch.
        traced: whether a :class:`Place` has a trace.
        totals: the numbers of samples of the global batches, as far as they are known.
        uneven: whether there may be others, or some that ranks cannot divide evenly.
        told: the script's objects whose order depends on the epoch that they are told.
    """

    loader: DataLoader[Any]
    identity: dict[str, Any]
    traced: bool
    totals: set[int]
    uneven: bool
    told: tuple[Any, ...]

    def __len__(self) -> int: ...

    def begin(self, place: Place) -> Iterator[Drawn]:
        """Begin to read an epoch, from this place on."""


class MapSource:
    """Reads a map-style data set, in the order of its loader or of hpctrain's own."""

    def __init__(self, loader: DataLoader[Any], comm: Communicator, *, evaluation: bool, seed: int) -> None:
        self._comm = comm
        self._evaluation = evaluation
        self._order: Order = order_of(loader, comm, evaluation=evaluation, seed=seed)
        self.identity, self.traced = self._order.identity, self._order.traced
        self.totals, self.uneven, self.told = self._order.totals, self._order.uneven, self._order.told
        self._axes = compare_loaders(comm, loader, evaluation=evaluation, seed=seed, agreed=self.traced)
        self._indices = _Indices()
        self.loader: DataLoader[Any] = DataLoader(
            loader.dataset, batch_sampler=self._indices, collate_fn=loader.collate_fn, **settings_of(loader)
        )

    def __len__(self) -> int:
        if self._evaluation and not self.traced:
            return sum(1 for part in self._order.parts(0) if part.own)
        return len(self._order)

    def begin(self, place: Place) -> Iterator[Drawn]:
        if self._evaluation and not self.uneven:
            refuse_idle_ranks(self._comm, self.totals, len(self.loader.dataset))  # type: ignore[arg-type]
        # The loader's workers read ahead of the training.
        ahead, parts = itertools.tee(self._parts(place))
        self._indices.batches = (part.own or part.whole[:1] * SPARE_SAMPLES for part, _ in ahead)
        return self._follow(iter(self.loader), parts)

    def _parts(self, place: Place) -> Iterator[tuple[Part, Place]]:
        """This rank's parts from a place on, each with the place behind it."""
        at = Place(place.epoch)
        for part in self._order.parts(place.epoch):
            if at.batches == place.batches:
                require_same_order(at, place)
            if self._evaluation and self.uneven:
                refuse_idle_ranks(self._comm, {part.total})
            trace = trace_of(at.trace, part) if self.traced else ()
            at = Place(at.epoch, at.batches + 1, trace)
            # In an evaluation, which reduces nothing, a rank skips a batch it has no sample of.
            if at.batches > place.batches and (part.own or not self._evaluation):
                yield part, at
        if at.batches <= place.batches:
            require_same_order(at, place)

    def _follow(self, batches: Iterator[Any], parts: Iterator[tuple[Part, Place]]) -> Iterator[Drawn]:
        for batch, (part, after) in zip(batches, parts, strict=True):
            self._axes.check(batch, len(part.own) or SPARE_SAMPLES, self._comm.rank)
            yield Drawn(batch, part.total, len(part.own), after)


class _Indices(torch.utils.data.Sampler[list[Any]]):
    """The indices of this rank's parts, from where an epoch begins."""

    batches: Iterator[list[Any]] = iter(())

    def __iter__(self) -> Iterator[list[Any]]:
        return self.batches


def settings_of(loader: DataLoader[Any]) -> dict[str, Any]:
    """The settings of a loader that say how it reads, not what."""
    return {
        "num_workers": loader.num_workers,
        "pin_memory": loader.pin_memory,
        "timeout": loader.timeout,
        "worker_init_fn": loader.worker_init_fn,
        "multiprocessing_context": loader.multiprocessing_context,
        "generator": loader.generator,
        "prefetch_factor": loader.prefetch_factor,
        "persistent_workers": loader.persistent_workers,
    }


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


def refuse_idle_ranks(comm: Communicator, totals: set[int], samples: int = 0) -> None:
    """Refuse a batch that some ranks have no sample of, where the model computes on all of them together.

    Args:
        totals: the samples of global batches of an evaluation.
        samples: those of the whole data set, where they are known.

    Raises:
        HpctrainError: says which batch size to choose.
    """
    sizes, ranks = mesh_of(comm).sizes, data_place(comm).ranks
    # The last ranks are idle. Where FSDP2 divides the model, the ranks along dp_shard compute together.
    together = ranks if sizes["pp"] > 1 else sizes["dp_shard"] if syncing else 1
    idle = [total for total in totals if total < ranks and total % together]
    if idle:
        fitting = range(max(ranks, *totals), samples + 1)
        size = next((each for each in fitting if not 0 < samples % each < ranks), None)
        raise HpctrainError(
            "HT-shard-idle-ranks",
            "a batch of this evaluation has {samples} samples for {ranks} ranks: those without one "
            "skip it, and the others would wait for them, because the model is divided over the ranks",
            f"DataLoader(dataset, batch_size={size}) gives every rank a sample of each batch"
            if size
            else "let each rank evaluate all samples: leave ht.shard out",
            samples=min(idle),
            ranks=ranks,
        )
