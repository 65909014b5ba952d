"""Give every rank its part of a DataLoader's batches."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, SequentialSampler

from hpctrain.comm import Communicator, current
from hpctrain.data.sampling import Share, batch_count, epoch_order, global_batches, share
from hpctrain.errors import HpctrainError


class ShardedLoader:
    """This rank's part of each batch of a loader, in one order for all ranks, a new one each epoch.

    While a batch is in work, ``comm.batch_weight`` holds its weight in the global batch. Each ``iter()`` is an epoch.
    """

    def __init__(self, loader: DataLoader[Any], comm: Communicator, *, seed: int) -> None:
        self._comm = comm
        self._shuffled = _is_shuffled(loader)
        self._sampler = _ShareSampler(loader, comm, shuffled=self._shuffled, seed=seed)
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
        # The loader's workers read ahead, so the shares are computed a second time at the pace of the training.
        shares = self._sampler.shares()
        try:
            for batch, own in zip(self._loader, shares, strict=True):
                self._comm.batch_weight = own.weight if self._shuffled else 1.0
                yield batch
        finally:
            self._comm.batch_weight = 1.0
            self._sampler.epoch += 1


class _ShareSampler(torch.utils.data.Sampler[list[int]]):
    """The indices of this rank's part of each global batch."""

    def __init__(self, loader: DataLoader[Any], comm: Communicator, *, shuffled: bool, seed: int) -> None:
        if loader.batch_size is None:
            raise HpctrainError("ht.shard needs a loader with a batch_size", "DataLoader(dataset, batch_size=…)")
        self._samples = len(loader.dataset)  # type: ignore[arg-type]
        self._size = loader.batch_size
        self._drop_last = loader.drop_last
        self._comm = comm
        self._shuffled = shuffled
        self._seed = seed
        self.epoch = 0

    def __len__(self) -> int:
        if self._shuffled:
            return batch_count(self._samples, self._size, drop_last=self._drop_last)
        return sum(1 for _ in self.shares())

    def __iter__(self) -> Iterator[list[int]]:
        for own in self.shares():
            yield own.indices.tolist()

    def shares(self) -> Iterator[Share]:
        """This epoch's parts; without shuffling, which is evaluation, a rank skips a batch it has no sample of."""
        order = (
            epoch_order(self._samples, seed=self._seed, epoch=self.epoch)
            if self._shuffled
            else torch.arange(self._samples).numpy()
        )
        for batch in global_batches(order, self._size, drop_last=self._drop_last):
            own = share(batch, self._comm.rank, self._comm.size)
            if self._shuffled or own.count:
                yield own


def shard(loader: DataLoader[Any], *, comm: Communicator | None = None, seed: int = 0) -> ShardedLoader:
    """Divide each batch of a loader over the ranks.

    The loader's ``batch_size`` is that of the global batch, so the script gives the same numbers on any number of
    ranks. Where it does not divide evenly, gradients are weighted by the samples behind them, and the mean over the
    ranks stays the mean over the batch. A loader that shuffles is taken to be for training; one that does not, for
    evaluation: its samples are then seen exactly once over all ranks.

    Args:
        loader: over a map-style dataset, with ``shuffle=True`` or the default order.
        comm: the ranks; by default those that :func:`hpctrain.init` joined.
        seed: with the number of the epoch, decides the order.

    Raises:
        HpctrainError: an iterable dataset, or a sampler of the user's own.
    """
    return ShardedLoader(loader, comm or current(), seed=seed)


def _is_shuffled(loader: DataLoader[Any]) -> bool:
    if isinstance(loader.dataset, IterableDataset):
        raise HpctrainError(
            "ht.shard cannot divide an iterable dataset: its samples have no numbers",
            "let the dataset itself yield every comm.size-th sample from comm.rank on",
        )
    if not isinstance(loader.sampler, RandomSampler | SequentialSampler):
        raise HpctrainError(
            f"ht.shard cannot divide a loader with the sampler {type(loader.sampler).__name__}",
            "give the DataLoader shuffle=True or no sampler; ht.shard makes the order itself",
        )
    return isinstance(loader.sampler, RandomSampler)
