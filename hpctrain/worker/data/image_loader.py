"""Streams ImageNet in pieces that worker processes prepare in advance."""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Iterable, Sequence
from pathlib import Path

import numpy as np

from hpctrain.common.recipes.schema import Recipe
from hpctrain.common.shards.image_shards import open_shards
from hpctrain.worker.data.decoder import Decoder, DecodingJob, LoadedPiece
from hpctrain.worker.data.samples import Samples
from hpctrain.worker.data.sampling import Indices, sample_of
from hpctrain.worker.data.workers import Workers


class Pool:
    """Makes images for the sources of one folder, one stream at a time."""

    def __init__(self, job: DecodingJob) -> None:
        self.job = job

    def stream(self, decoder: Decoder, split: str, pieces: Iterable[Indices], epoch: int) -> Generator[LoadedPiece]:
        """The images of each piece, in order."""
        raise NotImplementedError

    def close(self) -> None:
        """End the workers, if there are any. Idempotent; another stream starts them again."""


class WorkerPool(Pool):
    """Makes images in worker processes, or by the decoder if there are none; starts none before the first stream.

    Args:
        folder: what ``hpctrain data shard`` wrote.
        recipe: says how images are made and by how many processes.
    """

    def __init__(self, folder: Path, recipe: Recipe) -> None:
        exact = recipe.data.decode == "full"
        super().__init__(DecodingJob(folder=folder.absolute(), seed=recipe.seed, images=recipe.images, exact=exact))
        self._count = recipe.data.decoders()
        self._workers: Workers | None = None

    def stream(self, decoder: Decoder, split: str, pieces: Iterable[Indices], epoch: int) -> Generator[LoadedPiece]:
        return self._ahead(split, list(pieces), epoch) if self._count else self._here(decoder, split, pieces, epoch)

    def close(self) -> None:
        if self._workers:
            self._workers.end()
            self._workers = None

    def _here(self, decoder: Decoder, split: str, pieces: Iterable[Indices], epoch: int) -> Generator[LoadedPiece]:
        for indices in pieces:
            images = np.empty((len(indices), *self.job.shape(split, epoch)), np.uint8)
            decoder.write(indices.tolist(), epoch, images)
            yield LoadedPiece(indices=indices, images=images)

    def _ahead(self, split: str, pieces: Sequence[Indices], epoch: int) -> Generator[LoadedPiece]:
        if not pieces:
            return
        workers = self._workers = self._workers or Workers(self.job, self._count)
        try:
            yield from workers.stream(split, pieces, epoch)
        except GeneratorExit:
            if workers is self._workers and not workers.drop():
                self.close()
            raise
        except BaseException:
            self.close()
            raise


class ImageNet:
    """A split of a folder of shards, as :class:`~hpctrain.worker.data.samples.SampleSource` says. One stream at a time.

    Without the images that could not be decoded when the shards were made.

    Args:
        folder: what ``hpctrain data shard`` wrote.
        split: ``train``, whose images are cut and changed at random, or ``val``.
        recipe: says how images are made, and by how many processes.
        pool: makes the images, and may serve another split too; by default a new one.

    Raises:
        HpctrainError: the folder or the split is missing or incomplete.
    """

    def __init__(self, folder: Path, split: str, recipe: Recipe, pool: Pool | None = None) -> None:
        self._shards = open_shards(folder, split)
        self._pool = pool or WorkerPool(folder, recipe)
        self._decoder = Decoder(self._pool.job, self._shards)
        self._split = split
        self._shown = self._shards.decodable[: recipe.data.limit]

    def __len__(self) -> int:
        return len(self._shown)

    @property
    def fingerprint(self) -> str:
        """SHA-256 of the split's index: which images, with which labels, in which order."""
        return self._shards.fingerprint

    @property
    def classes(self) -> tuple[str, ...]:
        """The WordNet identifiers by label."""
        return self._shards.classes

    def stream(self, pieces: Iterable[Indices], epoch: int) -> Generator[Samples]:
        """The samples of each piece; see :class:`hpctrain.worker.data.samples.SampleSource`.

        Raises:
            HpctrainError: an image cannot be decoded, a shard cannot be read, or a worker died or does not answer.
        """
        # Repetitions stay in the upper bits.
        shown = (piece - sample_of(piece) + self._shown[sample_of(piece)] for piece in pieces)
        with contextlib.closing(self._pool.stream(self._decoder, self._split, shown, epoch)) as ready:
            for piece in ready:
                yield Samples(images=piece.images, labels=self._shards.labels[sample_of(piece.indices)])

    def close(self) -> None:
        """End the workers and close the files. Idempotent; another stream starts the workers again."""
        self._pool.close()
        self._shards.close()
