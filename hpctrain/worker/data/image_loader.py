"""Streams ImageNet in pieces that worker processes prepare in advance."""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpctrain.common.errors import HpctrainError
from hpctrain.common.recipes.schema import Recipe
from hpctrain.common.shards.image_shards import open_shards
from hpctrain.worker.data.decoder import STAGES, Broken, Decoder, DecodingJob
from hpctrain.worker.data.samples import BROKEN, Samples
from hpctrain.worker.data.sampling import Indices, sample_of
from hpctrain.worker.data.worker import DecodingTask
from hpctrain.worker.data.workers import Workers

# At most so many images a worker makes between two messages, fewer if a short piece would not keep all workers busy.
# More would make the end of a stream wait longer.
_TASK_IMAGES = 16
# Pieces prepared after the one that is trained on, and the least number of tasks for each worker.
_PIECES_AHEAD = 3
_TASKS_AHEAD = 3


@dataclass(kw_only=True)
class LoadedPiece:
    """A piece that is being prepared.

    Attributes:
        indices: sample indices with their repetitions.
        images: an array, or a tensor on a GPU, of shape (N, height, width, 3); complete when ``tasks`` is 0.
        tasks: how many are not done.
        broken: the broken images found so far.
    """

    indices: Indices
    images: Any
    tasks: int
    broken: list[Broken]


class Pool:
    """Makes images for the sources of one folder, one stream at a time.

    Attributes:
        nanoseconds: spent so far by all processes together on each of :data:`hpctrain.worker.data.decoder.STAGES`, and
            by the rank on waiting for images (``rank waits``).
    """

    def __init__(self, job: DecodingJob) -> None:
        self.job = job
        self.nanoseconds: Counter[str] = Counter()
        self._open: Generator[LoadedPiece] | None = None

    @contextlib.contextmanager
    def pieces(
        self, decoder: Decoder, split: str, pieces: Iterable[Indices], epoch: int
    ) -> Iterator[Iterator[LoadedPiece]]:
        """The pieces of a stream.

        Raises:
            RuntimeError: another stream is open, whose images this one would overwrite.
        """
        if self._open:
            raise RuntimeError("another stream of these samples is open: close it first")
        self._open = self._stream(decoder, split, pieces, epoch)
        try:
            with contextlib.closing(self._open):
                yield self._open
        finally:
            self._open = None

    def close(self) -> None:
        """End the open stream, and workers. Idempotent; another stream starts them again."""
        if self._open:
            self._open.close()

    def _stream(self, decoder: Decoder, split: str, pieces: Iterable[Indices], epoch: int) -> Generator[LoadedPiece]:
        raise NotImplementedError


class WorkerPool(Pool):
    """Makes images in worker processes, or by the decoder if there are none; starts none before the first stream.

    Beside the others, ``nanoseconds`` has what workers spent otherwise while a stream was open (``idle``), and the
    processor's time (``processor``).

    Args:
        folder: what ``hpctrain data shard`` wrote.
        recipe: says how images are made and by how many processes.
    """

    def __init__(self, folder: Path, recipe: Recipe) -> None:
        exact = recipe.data.decode == "full"
        super().__init__(DecodingJob(folder=folder.absolute(), seed=recipe.seed, images=recipe.images, exact=exact))
        self._count = recipe.data.decoders()
        self._workers: Workers | None = None

    @property
    def pids(self) -> list[int]:
        """The process ids of the running workers."""
        return self._workers.pids if self._workers else []

    def _stream(self, decoder: Decoder, split: str, pieces: Iterable[Indices], epoch: int) -> Generator[LoadedPiece]:
        return self._ahead(split, list(pieces), epoch) if self._count else self._here(decoder, split, pieces, epoch)

    def close(self) -> None:
        """End the open stream and the workers. Idempotent; another stream starts them again."""
        super().close()
        self._end()

    def _end(self) -> None:
        if self._workers:
            self._workers.end()
            self._workers = None

    def _here(self, decoder: Decoder, split: str, pieces: Iterable[Indices], epoch: int) -> Generator[LoadedPiece]:
        for indices in pieces:
            images = np.empty((len(indices), *self.job.shape(split, epoch)), np.uint8)
            broken = decoder.write(indices.tolist(), epoch, images)
            self.nanoseconds += decoder.nanoseconds
            decoder.nanoseconds.clear()
            yield LoadedPiece(indices=indices, images=images, tasks=0, broken=broken)

    def _ahead(self, split: str, pieces: Sequence[Indices], epoch: int) -> Generator[LoadedPiece]:
        if not pieces:
            return
        if self._workers is None:
            self._workers = Workers(self.job, self._count)
        try:
            yield from _Ring(self._workers, self.job, self.nanoseconds, split, pieces, epoch).run()
        except GeneratorExit:
            if not self._workers.drop():
                self._end()
            raise
        except BaseException:
            self._end()
            raise


class ImageNet:
    """A split of a folder of shards, as :class:`~hpctrain.worker.data.samples.SampleSource` says. One stream at a time.

    Args:
        folder: what ``hpctrain data shard`` wrote.
        split: ``train``, whose images are cut and changed at random, or ``val``.
        recipe: says how images are made, by how many processes, and what is done with broken ones.
        pool: makes the images, and may serve another split too; by default a new one.

    Raises:
        HpctrainError: the folder or the split is missing or incomplete.
    """

    def __init__(self, folder: Path, split: str, recipe: Recipe, pool: Pool | None = None) -> None:
        self.broken: set[str] = set()
        self._shards = open_shards(folder, split)
        self._pool = pool or WorkerPool(folder, recipe)
        self._decoder = Decoder(self._pool.job, self._shards)
        self._split = split
        self._stops = recipe.data.broken_images == "stop"
        self._limit = recipe.data.limit

    def __len__(self) -> int:
        return min(self._limit or len(self._shards), len(self._shards))

    @property
    def nanoseconds(self) -> Mapping[str, int]:
        """See :class:`Pool`."""
        return self._pool.nanoseconds

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
            HpctrainError: an image is broken and the recipe stops at it, a shard cannot be read, or a worker died or
                does not answer.
            RuntimeError: another stream of the pool is open.
        """
        with self._pool.pieces(self._decoder, self._split, pieces, epoch) as ready:
            for piece in ready:
                yield self._samples(piece)

    def close(self) -> None:
        """End an open stream and the pool. Idempotent; another stream starts the pool again."""
        self._pool.close()
        self._shards.close()

    def _samples(self, piece: LoadedPiece) -> Samples:
        indices = sample_of(piece.indices)
        labels = self._shards.labels[indices]
        for position, key, message in piece.broken:
            if self._stops:
                raise HpctrainError(
                    "HT-data-broken-image",
                    "{where}: {key} cannot be decoded: {reason}",
                    "--set data.broken_images=skip leaves such images out, counts and names them",
                    exit_code=1,
                    where=self._shards.where(int(indices[position])),
                    key=key,
                    reason=message,
                )
            self.broken.add(key)
            labels[position] = BROKEN
        return Samples(images=piece.images, labels=labels)


class _Ring:
    """The pieces of one stream, at least one, each in one of a few places in the workers' memory.

    Args:
        nanoseconds: of :class:`Pool`, to which those of this stream are added.
    """

    def __init__(
        self,
        workers: Workers,
        job: DecodingJob,
        nanoseconds: Counter[str],
        split: str,
        pieces: Sequence[Indices],
        epoch: int,
    ) -> None:
        self._workers, self._job, self._split, self._pieces, self._epoch = workers, job, split, pieces, epoch
        self._nanoseconds, count = nanoseconds, workers.count
        longest = max(map(len, pieces))
        self._share = min(_TASK_IMAGES, -(-longest // count))
        ahead = max(_PIECES_AHEAD, -(-_TASKS_AHEAD * count * self._share // longest))
        self._places = min(len(pieces), 1 + ahead)
        self._image_bytes = int(np.prod(job.shape(split, epoch)))
        self._place_bytes = longest * self._image_bytes
        self._memory = workers.reserve(self._places * self._place_bytes)
        self._made: dict[int, LoadedPiece] = {}
        self._begun = 0
        # By the task's number: its piece, and the position in that at which it begins.
        self._tasks: dict[int, tuple[LoadedPiece, int]] = {}

    def run(self) -> Generator[LoadedPiece]:
        """The pieces in order; a piece's place is reused when the next is asked for."""
        begin, before = time.perf_counter_ns(), self._busy()
        try:
            yield from self._run()
        finally:
            passed = (time.perf_counter_ns() - begin) * self._workers.count
            self._nanoseconds["idle"] += passed - (self._busy() - before)

    def _busy(self) -> int:
        return sum(self._nanoseconds[stage] for stage in STAGES)

    def _run(self) -> Generator[LoadedPiece]:
        for number in range(len(self._pieces)):
            for other in range(number + len(self._made), min(number + self._places, len(self._pieces))):
                self._made[other] = self._begin(other)
            piece = self._made[number]
            while piece.tasks:
                self._take_result()
            yield piece
            del self._made[number]

    def _begin(self, number: int) -> LoadedPiece:
        indices = self._pieces[number]
        offset = number % self._places * self._place_bytes
        shape = len(indices), *self._job.shape(self._split, self._epoch)
        images: NDArray[np.uint8] = np.ndarray(shape, np.uint8, self._memory, offset)
        starts = range(0, len(indices), self._share)
        piece = LoadedPiece(indices=indices, images=images, tasks=len(starts), broken=[])
        for start in starts:
            task = DecodingTask(
                number=self._begun,
                split=self._split,
                epoch=self._epoch,
                indices=indices[start : start + self._share].tolist(),
                offset=offset + start * self._image_bytes,
            )
            self._begun += 1
            self._tasks[task.number] = piece, start
            self._workers.put(task)
        return piece

    def _take_result(self) -> None:
        begin = time.perf_counter_ns()
        result = self._workers.take()
        self._nanoseconds["rank waits"] += time.perf_counter_ns() - begin
        self._nanoseconds.update(result.nanoseconds)
        piece, start = self._tasks.pop(result.number)
        piece.tasks -= 1
        piece.broken += [(start + position, key, message) for position, key, message in result.broken]
