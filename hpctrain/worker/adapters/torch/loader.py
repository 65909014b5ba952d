"""Gives every rank its part of a DataLoader's batches."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, SequentialSampler

from hpctrain.common.errors import HpctrainError
from hpctrain.worker.adapters.data_ranks import data_place, mesh_of
from hpctrain.worker.adapters.recording import note_data_position, warn_of_data_restart
from hpctrain.worker.adapters.torch.random_streams import ready
from hpctrain.worker.adapters.torch.reducer import syncing
from hpctrain.worker.adapters.torch.same_data import compare_loaders
from hpctrain.worker.adapters.torch.weights import SPARE_SAMPLES, batch_weights
from hpctrain.worker.comm import Communicator, current
from hpctrain.worker.data.sampling import RankShare, batch_count, epoch_order, global_batches, share


class ShardedLoader:
    """This rank's part of each batch of a loader. All ranks use one order, a new one for each epoch.

    Each ``iter()`` is an epoch, and :meth:`set_epoch` says which. :meth:`state_dict` is the place of the next batch, in
    global batches, so :meth:`load_state_dict` continues there on any number of ranks, in the middle of an epoch too.
    """

    def __init__(self, loader: DataLoader[Any], comm: Communicator, *, evaluation: bool, seed: int) -> None:
        self._comm = comm
        self._weights = batch_weights(comm)
        self._evaluation = evaluation
        self._started = 0
        # The epoch and number of the batch after the last one that the script was given.
        self._handed_out = (0, 0)
        self._sampler = _ShareSampler(loader, comm, shuffled=_is_shuffled(loader), evaluation=evaluation, seed=seed)
        self._axes = compare_loaders(comm, loader, evaluation=evaluation, seed=seed)
        self._loader: DataLoader[Any] = DataLoader(
            loader.dataset,
            batch_sampler=self._sampler,
            num_workers=loader.num_workers,
            collate_fn=loader.collate_fn,
            pin_memory=loader.pin_memory,
            timeout=loader.timeout,
            worker_init_fn=loader.worker_init_fn,
            multiprocessing_context=loader.multiprocessing_context,
            generator=loader.generator,
            prefetch_factor=loader.prefetch_factor,
            persistent_workers=loader.persistent_workers,
        )
        self.dataset = loader.dataset

    def __len__(self) -> int:
        return len(self._sampler)

    def __iter__(self) -> Iterator[Any]:
        if self._evaluation:
            self._sampler.refuse_idle_ranks()
        else:
            warn_of_data_restart(self._comm)
        epoch, first = self._sampler.epoch, self._sampler.first
        with self._unchanged_generator() if first else contextlib.nullcontext():
            batches = iter(self._loader)  # takes the epoch's order
        self._sampler.epoch, self._sampler.first = epoch + 1, 0
        self._handed_out = (epoch, first)
        self._started += 1
        self._weights.expect(self._sampler.totals(), evaluation=self._evaluation)
        return self._draw(batches, epoch, first, self._started)

    def set_epoch(self, epoch: int) -> None:
        """Make the next ``iter()`` that epoch, whose order depends on its number and the seed alone.

        It begins at its first batch; or where :meth:`load_state_dict` has put it, if that was in this epoch.
        """
        note_data_position()
        if epoch != self._sampler.epoch:
            self._place(epoch, 0)

    def state_dict(self) -> dict[str, int]:
        """The place of the batch after the last that the script was given, whatever was read ahead.

        After a ``break`` that is the next batch of the same epoch; at the end of an epoch, the begin of the next.
        """
        epoch, batches = self._handed_out
        return {"epoch": epoch, "batches": batches, **self._sampler.identity}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Make the next ``iter()`` begin at the place of :meth:`state_dict`, on this number of ranks.

        Raises:
            HpctrainError: not the state of a loader, or one in the middle of an epoch whose batches differ here.
        """
        own = self._sampler.identity
        if missing := {"epoch", "batches", *own} - state.keys():
            raise HpctrainError(
                "HT-loader-bad-state",
                "this is not the state of a loader of ht.shard: it lacks {missing}",
                "load what its state_dict() returned",
                missing=", ".join(sorted(missing)),
            )
        if state["batches"] and (other := [name for name in own if own[name] != state[name]]):
            differ = ", ".join(f"{name} was {state[name]} and is {own[name]}" for name in other)
            raise HpctrainError(
                "HT-loader-different-batches",
                "the loader's state is in the middle of epoch {epoch}, whose batches were others: {differ}",
                f"load it with the same data, batch size and seed; or begin an epoch: set_epoch({state['epoch'] + 1})",
                epoch=state["epoch"],
                differ=differ,
            )
        note_data_position()
        self._place(state["epoch"], state["batches"])

    def _place(self, epoch: int, batches: int) -> None:
        self._sampler.epoch, self._sampler.first = self._handed_out = (epoch, batches)

    @contextlib.contextmanager
    def _unchanged_generator(self) -> Iterator[None]:
        """Restore the generator after an epoch that is continued: its first beginning has drawn from it already."""
        generator = self._loader.generator or torch.default_generator
        state = generator.get_state()
        yield
        generator.set_state(state)

    def _draw(self, batches: Iterator[Any], epoch: int, first: int, started: int) -> Iterator[Any]:
        # The loader's workers read ahead, so the shares are computed a second time at the pace of the training.
        for batch, (number, total, own) in zip(batches, self._sampler.shares(epoch, first), strict=True):
            if self._loader.persistent_workers and started != self._started:
                raise HpctrainError(
                    "HT-loader-two-iterators",
                    "two iterators of one loader at the same time share its persistent workers, and mix "
                    "up their batches",
                    "use one after the other, or persistent_workers=False",
                )
            self._axes.check(batch, own.count or SPARE_SAMPLES, self._comm.rank)
            self._weights.drawn(batch, total, evaluation=self._evaluation)
            if started == self._started:
                self._handed_out = (epoch, number + 1)
            yield batch
        if started == self._started:
            self._handed_out = (epoch + 1, 0)


class _ShareSampler(torch.utils.data.Sampler[list[int]]):
    """The indices of this rank's part of each global batch."""

    def __init__(
        self, loader: DataLoader[Any], comm: Communicator, *, shuffled: bool, evaluation: bool, seed: int
    ) -> None:
        if loader.batch_size is None:
            raise HpctrainError(
                "HT-shard-no-batch-size",
                "ht.shard needs a loader with a batch_size",
                "DataLoader(dataset, batch_size=…)",
            )
        self._samples = len(loader.dataset)  # type: ignore[arg-type]
        self._size = loader.batch_size
        self._drop_last = loader.drop_last
        self._comm = comm
        self._shuffled = shuffled
        self._evaluation = evaluation
        self._seed = seed
        # Where the next iteration begins.
        self.epoch = self.first = 0

    def __len__(self) -> int:
        if self._evaluation:
            return sum(1 for _ in self.shares(self.epoch, 0))
        return batch_count(self._samples, self._size, drop_last=self._drop_last)

    def __iter__(self) -> Iterator[list[int]]:
        # Not a generator: the epoch is the one at the moment of the call.
        return (self._computed(own) for _, _, own in self.shares(self.epoch, self.first))

    def _computed(self, own: RankShare) -> list[int]:
        samples: list[int] = own.indices.tolist()
        return samples if own.count else samples * SPARE_SAMPLES

    @property
    def identity(self) -> dict[str, int]:
        """What decides, together with the epoch, which samples are in a global batch."""
        seed = self._seed if self._shuffled else -1
        return {"samples": self._samples, "batch_size": self._size, "drop_last": self._drop_last, "seed": seed}

    def totals(self) -> set[int]:
        """The numbers of samples of the global batches of an epoch."""
        rest = 0 if self._drop_last else self._samples % self._size
        return {size for size in (self._size if self._samples >= self._size else 0, rest) if size}

    def refuse_idle_ranks(self) -> None:
        """Refuse a batch that some ranks have no sample of, where the model computes on all of them together.

        Raises:
            HpctrainError: says which batch size to choose.
        """
        sizes, ranks = mesh_of(self._comm).sizes, data_place(self._comm).ranks
        # The last ranks are idle. Where FSDP2 divides the model, the ranks along dp_shard compute together.
        together = ranks if sizes["pp"] > 1 else sizes["dp_shard"] if syncing else 1
        idle = [total for total in self.totals() if total < ranks and total % together]
        if idle:
            fitting = range(max(self._size, ranks), self._samples + 1)
            size = next((each for each in fitting if not 0 < self._samples % each < ranks), None)
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

    def shares(self, epoch: int, first: int) -> Iterator[tuple[int, int, RankShare]]:
        """An epoch's parts from global batch ``first`` on, each with that batch's number and number of samples.

        In an evaluation, which reduces nothing, a rank skips a batch it has no sample of.
        """
        order = epoch_order(self._samples, seed=self._seed, epoch=epoch) if self._shuffled else np.arange(self._samples)
        place = data_place(self._comm)
        batches = enumerate(global_batches(order, self._size, drop_last=self._drop_last))
        for number, batch in itertools.islice(batches, first, None):
            own = share(batch, *place)
            if own.count or not self._evaluation:
                yield number, len(batch), own


def shard(
    data: DataLoader[Any], *, comm: Communicator | None = None, evaluation: bool = False, seed: int = 0
) -> ShardedLoader:
    """Divide each batch of a loader over the ranks. Collective.

    The loader's ``batch_size`` is that of the global batch, so the script gives the same numbers on any number of
    ranks. If it does not divide evenly, gradients are weighted by the number of samples they were computed from, so the
    mean over the ranks is still the mean over the batch; a rank without a sample of its own gets another rank's, with
    weight 0. Batches may be prefetched, drawn again or left unused: the weight follows the tensors into the model
    (:mod:`hpctrain.worker.adapters.torch.weights`). If hpctrain cannot tell which batch a model computed, the backward
    pass raises HpctrainError before a gradient is reduced: pass the model the tensors that the loader yields, or views
    or copies of whole ones. ``torch.autograd.grad`` sees weighted gradients too.

    The ranks compare the loader's settings, the length of its data set, the indices of a ``Subset``, and what up to 64
    samples look like, for at most about 0.05 s or two samples; what differs from fetch to fetch on one rank is not
    compared. A training batch from which ``collate_fn`` left samples out is refused.

    Args:
        data: a loader over a map-style dataset, with ``shuffle=True`` or the default order.
        comm: the ranks; by default those that :func:`hpctrain.init` joined.
        evaluation: every sample is seen exactly once over all ranks, unweighted; ranks may get different numbers of
            batches.
        seed: determines the order, together with the epoch number.

    Raises:
        HpctrainError: an iterable dataset, a sampler of the user's own, or one that repeats or leaves out samples;
            or ranks that were given different data or settings.
    """
    comm = comm or current()
    sharded = ShardedLoader(data, comm, evaluation=evaluation, seed=seed)
    if not evaluation:
        ready(comm, "data")
    return sharded


def _is_shuffled(loader: DataLoader[Any]) -> bool:
    if isinstance(loader.dataset, IterableDataset):
        raise HpctrainError(
            "HT-shard-iterable-dataset",
            "ht.shard cannot divide an iterable dataset: its samples have no indices",
            "let the dataset itself yield every comm.size-th sample from comm.rank on",
        )
    sampler = loader.sampler
    whole = isinstance(sampler, SequentialSampler) or (
        isinstance(sampler, RandomSampler) and not sampler.replacement and sampler.num_samples == len(loader.dataset)  # type: ignore[arg-type]
    )
    if not whole:
        raise HpctrainError(
            "HT-shard-wrong-sampler",
            "ht.shard cannot divide a loader whose {sampler} repeats or leaves out samples, or is a custom one",
            "give the DataLoader shuffle=True or no sampler; ht.shard makes the order itself",
            sampler=type(sampler).__name__,
        )
    return isinstance(sampler, RandomSampler)
