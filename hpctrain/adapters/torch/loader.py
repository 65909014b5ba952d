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

    def __init__(self, loader: DataLoader[Any], comm: Communicator, *, evaluation: bool, seed: int) -> None:
        self._comm = comm
        self._evaluation = evaluation
        self._sampler = _ShareSampler(loader, comm, shuffled=_is_shuffled(loader), evaluation=evaluation, seed=seed)
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
                if not self._evaluation:
                    self._weigh(own.weight)
                yield batch
        finally:
            self._comm.batch_weight, self._comm.batch_weighed = 1.0, True
            self._sampler.epoch += 1

    def _weigh(self, weight: float) -> None:
        """Let the next backward pass use the weight of the batch that was drawn last: it cannot know of another."""
        if weight != self._comm.batch_weight and not self._comm.batch_weighed and torch.is_grad_enabled():
            raise HpctrainError(
                "a batch was drawn from a sharded loader before the backward pass of the one before, and the two weigh "
                "differently because a batch does not divide evenly over the ranks",
                "draw one batch a backward pass, under torch.no_grad() where there is none, or give the loader a "
                "batch_size that is a multiple of the ranks and drop_last=True",
            )
        self._comm.batch_weight, self._comm.batch_weighed = weight, False


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
            return sum(1 for _ in self.shares())
        return batch_count(self._samples, self._size, drop_last=self._drop_last)

    def __iter__(self) -> Iterator[list[int]]:
        for own in self.shares():
            yield own.indices.tolist()

    def shares(self) -> Iterator[Share]:
        """This epoch's parts. In an evaluation, which reduces nothing, a rank skips a batch it has no sample of."""
        order = (
            epoch_order(self._samples, seed=self._seed, epoch=self.epoch)
            if self._shuffled
            else torch.arange(self._samples).numpy()
        )
        for batch in global_batches(order, self._size, drop_last=self._drop_last):
            own = share(batch, self._comm.rank, self._comm.size)
            if own.count or not self._evaluation:
                yield own


def shard(
    loader: DataLoader[Any], *, comm: Communicator | None = None, evaluation: bool = False, seed: int = 0
) -> ShardedLoader:
    """Divide each batch of a loader over the ranks.

    The loader's ``batch_size`` is that of the global batch, so the script gives the same numbers on any number of
    ranks. Where it does not divide evenly, gradients are weighted by the samples behind them, and the mean over the
    ranks stays the mean over the batch; a rank without a sample of its own gets one of another's with the weight 0.
    The weight is that of the batch drawn last, so draw a batch after the backward pass of the one before;
    ``torch.autograd.grad`` sees weighted gradients too.

    Args:
        loader: over a map-style dataset, with ``shuffle=True`` or the default order.
        comm: the ranks; by default those that :func:`hpctrain.init` joined.
        evaluation: every sample is seen exactly once over all ranks, none weighted; ranks may get different numbers
            of batches.
        seed: with the number of the epoch, decides the order.

    Raises:
        HpctrainError: an iterable dataset, a sampler of the user's own, or one that repeats or leaves out samples.
    """
    return ShardedLoader(loader, comm or current(), evaluation=evaluation, seed=seed)


def _is_shuffled(loader: DataLoader[Any]) -> bool:
    if isinstance(loader.dataset, IterableDataset):
        raise HpctrainError(
            "ht.shard cannot divide an iterable dataset: its samples have no numbers",
            "let the dataset itself yield every comm.size-th sample from comm.rank on",
        )
    sampler = loader.sampler
    whole = isinstance(sampler, SequentialSampler) or (
        isinstance(sampler, RandomSampler) and not sampler.replacement and sampler.num_samples == len(loader.dataset)  # type: ignore[arg-type]
    )
    if not whole:
        raise HpctrainError(
            f"ht.shard cannot divide a loader whose {type(sampler).__name__} repeats or leaves out samples, or is your "
            "own",
            "give the DataLoader shuffle=True or no sampler; ht.shard makes the order itself",
        )
    return isinstance(sampler, RandomSampler)
