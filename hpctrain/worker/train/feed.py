"""What a rank computes: its parts of the global batches, with the samples mixed into them, and of the test set."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from hpctrain.common.recipes.schema import Recipe
from hpctrain.worker.adapters.data_ranks import data_place
from hpctrain.worker.comm import Communicator
from hpctrain.worker.comm.rank_run import run
from hpctrain.worker.data.mixing import MixedSamples, Mixer, piece
from hpctrain.worker.data.samples import NO_LABEL, Samples, SampleSource
from hpctrain.worker.data.sampling import Indices, RankShare, endless_order, epoch_order, global_batches, parts, share

if TYPE_CHECKING:
    from hpctrain.worker.train.trainer import Trainer

_NOTHING = np.empty(0, np.int64)


class Feed:
    """Divides the epochs of a recipe for one rank; the rank and the number of ranks are looked up each time.

    Args:
        recipe: with the batch worked out for a number of ranks.
        images: how many samples there are to train on.
    """

    def __init__(self, recipe: Recipe, comm: Communicator, images: int) -> None:
        self._recipe = recipe
        self._comm = comm
        self._images = images
        self._mixer = Mixer(recipe.mixing, recipe.seed) if recipe.mixing else None
        # The same for all batches of a size: a GPU would wait while they are worked out anew.
        self._parts: dict[tuple[int, int, int], list[MixedSamples]] = {}

    @property
    def per_epoch(self) -> int:
        """The samples of an epoch."""
        return self._recipe.data.per_epoch(self._images)

    def batches(self, epoch: int, seen: int, size: int) -> list[Indices]:
        """The remaining global batches of an epoch.

        Args:
            seen: how many of the epoch's samples are done.
        """
        return list(global_batches(self._order(epoch)[seen:], size, drop_last=self._recipe.batch.drop_last))

    def _order(self, epoch: int) -> Indices:
        data, seed, length = self._recipe.data, self._recipe.seed, self.per_epoch
        if data.name == "text":
            return endless_order(self._images, seed=seed, first=epoch * length, count=length)
        return epoch_order(self._images, seed=seed, epoch=epoch, repeats=data.repeats, length=length)

    def share(self, batch: Indices, rank: int | None = None) -> RankShare:
        """The part of a batch that belongs to this rank, or to ``rank``."""
        place = data_place(self._comm)
        return share(batch, place.rank if rank is None else rank, place.ranks)

    def count(self, batch: Indices) -> int:
        """The number of parts of a batch on each rank."""
        return self._recipe.batch.parts(len(batch), data_place(self._comm).ranks)

    def pieces(self, batches: Sequence[Indices]) -> Iterator[Indices]:
        """The samples to load: all of this rank's parts of all batches."""
        return (batch[part.positions] for batch in batches for part in self.parts(batch))

    def parts(self, batch: Indices, rank: int | None = None) -> list[MixedSamples]:
        """The parts of a batch that this rank, or ``rank``, computes, with the samples that they are mixed with."""
        place = data_place(self._comm)
        key = (len(batch), place.rank if rank is None else rank, place.ranks)
        if key not in self._parts:
            own, mixing = parts(self.share(np.arange(len(batch)), rank), self.count(batch)), self._recipe.mixing
            self._parts[key] = [
                piece(positions, len(batch), mixing.group)
                if mixing
                else MixedSamples(positions=positions, partners=_NOTHING, starts=_NOTHING)
                for positions in own
            ]
        return self._parts[key]

    def completed(self, samples: Samples, part: MixedSamples, epoch: int, first: int) -> Samples:
        """The samples of a part with their random choices: how they are mixed.

        Args:
            samples: those that were loaded for the part.
            first: how many samples of the epoch come before the batch.
        """
        if self._mixer is None:
            return samples
        height, width = samples.images.shape[1:3]
        return replace(samples, mixture=self._mixer.mixture(part, epoch, first, height, width))


class SamplesAhead:
    """The samples of a stream, in its order, of which the next can be taken while a device still computes.

    Args:
        place: begins to bring samples to where they are computed on, as they are valid only until the next ones.
    """

    def __init__(self, stream: Iterator[Samples], place: Callable[[Samples], Samples]) -> None:
        self._placed = map(place, stream)
        self._fetched: list[Samples] = []
        self._failed: Exception | None = None

    def __iter__(self) -> Iterator[Samples]:
        return self

    def __next__(self) -> Samples:
        if self._failed:
            raise self._failed
        if self._fetched:
            return self._fetched.pop()
        with run.times.reads():
            return next(self._placed)

    def fetch(self) -> None:
        """Take the next samples of the stream, if there are any, while a GPU computes; an error is raised later."""
        if self._fetched or self._failed:
            return
        with run.times.reads():
            try:
                self._fetched.extend(itertools.islice(self._placed, 1))
            except Exception as error:
                self._failed = error


def evaluate(trainer: Trainer, comm: Communicator, test: SampleSource, size: int, epoch: int) -> tuple[float, float]:
    """Mean loss and accuracy on the test set, each sample of which is seen by one data-parallel rank. Collective.

    All ranks compute equally many parts, since a model that is divided over them needs all of them for each.

    Args:
        size: the largest number of samples to compute at once.
    """
    place = data_place(comm)
    own = share(np.arange(len(test)), place.rank, place.ranks)
    left, count = own.count, -(-len(test) // (place.ranks * size))
    sums = np.zeros(2)
    with contextlib.closing(test.stream(parts(own, count), epoch)) as stream:
        for part in stream:
            # A rank that has run out of samples computes repeated ones, which do not count.
            samples = part if left > 0 else replace(part, labels=np.full_like(part.labels, NO_LABEL))
            left -= len(part)
            sums += np.array(trainer.evaluate(samples))
    # The ranks of a tp group count the same samples; in a pp group the last counts them, times the number of stages.
    loss, accuracy = comm.allreduce(sums, "sum") / (comm.size // place.ranks) / len(test)
    return float(loss), float(accuracy)
