"""Gives every rank its part of a DataLoader's batches."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, SequentialSampler

from hpctrain.adapters.data_ranks import data_place
from hpctrain.adapters.torch.random_streams import ready
from hpctrain.adapters.torch.same_data import compare_loaders
from hpctrain.adapters.torch.weights import SPARE_SAMPLES, batch_weights
from hpctrain.comm import Communicator, current
from hpctrain.data.sampling import RankShare, batch_count, epoch_order, global_batches, share
from hpctrain.errors import HpctrainError


class ShardedLoader:
    """This rank's part of each batch of a loader. All ranks use one order, a new one for each epoch.

    Each ``iter()`` is an epoch.
    """

    def __init__(self, loader: DataLoader[Any], comm: Communicator, *, evaluation: bool, seed: int) -> None:
        self._weights = batch_weights(comm)
        self._evaluation = evaluation
        self._started = 0
        self._sampler = _ShareSampler(loader, comm, shuffled=_is_shuffled(loader), evaluation=evaluation, seed=seed)
        self._rank, self._axes = comm.rank, compare_loaders(comm, loader, evaluation=evaluation, seed=seed)
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
        epoch = self._sampler.epoch
        batches = iter(self._loader)  # takes the epoch's order
        self._sampler.epoch += 1
        self._started += 1
        self._weights.expect(self._sampler.totals(), evaluation=self._evaluation)
        return self._draw(batches, epoch, self._started)

    def _draw(self, batches: Iterator[Any], epoch: int, started: int) -> Iterator[Any]:
        # The loader's workers read ahead, so the shares are computed a second time at the pace of the training.
        for batch, (total, own) in zip(batches, self._sampler.shares(epoch), strict=True):
            if self._loader.persistent_workers and started != self._started:
                raise HpctrainError(
                    "two iterators of one loader at the same time share its persistent workers, and mix up their "
                    "batches",
                    "use one after the other, or persistent_workers=False",
                )
            self._axes.check(batch, own.count or SPARE_SAMPLES, self._rank)
            self._weights.drawn(batch, total, evaluation=self._evaluation)
            yield batch


class _ShareSampler(torch.utils.data.Sampler[list[int]]):
    """The indices of this rank's part of each global batch."""

    def __init__(
        self, loader: DataLoader[Any], comm: Communicator, *, shuffled: bool, evaluation: bool, seed: int
    ) -> None:
        if loader.batch_size is None:
            raise HpctrainError("ht.shard needs a loader with a batch_size", "DataLoader(dataset, batch_size=…)")
        self._samples = len(loader.dataset)  # type: ignore[arg-type]
        self._size = loader.batch_size
        self._drop_last = loader.drop_last
        self._comm = comm
        self._shuffled = shuffled
        self._evaluation = evaluation
        self._seed = seed
        self.epoch = 0

    def __len__(self) -> int:
        if self._evaluation:
            return sum(1 for _ in self.shares(self.epoch))
        return batch_count(self._samples, self._size, drop_last=self._drop_last)

    def __iter__(self) -> Iterator[list[int]]:
        # Not a generator: the epoch is the one at the moment of the call.
        return (self._computed(own) for _, own in self.shares(self.epoch))

    def _computed(self, own: RankShare) -> list[int]:
        samples: list[int] = own.indices.tolist()
        return samples if own.count else samples * SPARE_SAMPLES

    def totals(self) -> set[int]:
        """The numbers of samples of the global batches of an epoch."""
        rest = 0 if self._drop_last else self._samples % self._size
        return {size for size in (self._size if self._samples >= self._size else 0, rest) if size}

    def shares(self, epoch: int) -> Iterator[tuple[int, RankShare]]:
        """An epoch's parts, each with the number of samples of its global batch.

        In an evaluation, which reduces nothing, a rank skips a batch it has no sample of.
        """
        order = epoch_order(self._samples, seed=self._seed, epoch=epoch) if self._shuffled else np.arange(self._samples)
        place = data_place(self._comm)
        for batch in global_batches(order, self._size, drop_last=self._drop_last):
            own = share(batch, *place)
            if own.count or not self._evaluation:
                yield len(batch), own


def shard(
    loader: DataLoader[Any], *, comm: Communicator | None = None, evaluation: bool = False, seed: int = 0
) -> ShardedLoader:
    """Divide each batch of a loader over the ranks. Collective.

    The loader's ``batch_size`` is that of the global batch, so the script gives the same numbers on any number of
    ranks. If it does not divide evenly, gradients are weighted by the number of samples they were computed from, so the
    mean over the ranks is still the mean over the batch; a rank without a sample of its own gets another rank's, with
    weight 0. Batches may be prefetched, drawn again or left unused: the weight follows the tensors into the model
    (:mod:`hpctrain.adapters.torch.weights`). If hpctrain cannot tell which batch a model computed, the backward pass
    raises HpctrainError before a gradient is reduced: pass the model the tensors that the loader yields, or views or
    copies of whole ones. ``torch.autograd.grad`` sees weighted gradients too.

    The ranks compare the loader's settings, the length of its data set, the indices of a ``Subset``, and what up to 64
    samples look like, for at most about 0.05 s or two samples; what differs from fetch to fetch on one rank is not
    compared. A training batch from which ``collate_fn`` left samples out is refused.

    Args:
        loader: over a map-style dataset, with ``shuffle=True`` or the default order.
        comm: the ranks; by default those that :func:`hpctrain.init` joined.
        evaluation: every sample is seen exactly once over all ranks, unweighted; ranks may get different numbers of
            batches.
        seed: determines the order, together with the epoch number.

    Raises:
        HpctrainError: an iterable dataset, a sampler of the user's own, or one that repeats or leaves out samples;
            or ranks that were given different data or settings.
    """
    comm = comm or current()
    sharded = ShardedLoader(loader, comm, evaluation=evaluation, seed=seed)
    if not evaluation:
        ready(comm, "data")
    return sharded


def _is_shuffled(loader: DataLoader[Any]) -> bool:
    if isinstance(loader.dataset, IterableDataset):
        raise HpctrainError(
            "ht.shard cannot divide an iterable dataset: its samples have no indices",
            "let the dataset itself yield every comm.size-th sample from comm.rank on",
        )
    sampler = loader.sampler
    whole = isinstance(sampler, SequentialSampler) or (
        isinstance(sampler, RandomSampler) and not sampler.replacement and sampler.num_samples == len(loader.dataset)  # type: ignore[arg-type]
    )
    if not whole:
        raise HpctrainError(
            f"ht.shard cannot divide a loader whose {type(sampler).__name__} repeats or leaves out samples, or is a "
            "custom one",
            "give the DataLoader shuffle=True or no sampler; ht.shard makes the order itself",
        )
    return isinstance(sampler, RandomSampler)
