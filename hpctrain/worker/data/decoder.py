"""Makes images from a folder of shards one by one, in a rank or in one of its workers."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict

from hpctrain.common.recipes.sections import Images
from hpctrain.common.shards.decoding import BrokenImageError, Pixels
from hpctrain.common.shards.read import Shards
from hpctrain.worker.data.images import SCALES, changed, mean_colour, middle, size_at, training_part, validation_part
from hpctrain.worker.data.sampling import repetition_of, sample_of

# The position among the requested images, the key, and the decoder's message.
Broken = tuple[int, str, str]

_MESSAGE_CHARACTERS = 200
# What is done for an image, in this order: its file is read, decoded, resized and augmented, and its pixels are put
# where the rank expects them.
STAGES = ("read", "decode", "augment", "copy")
# The split whose images are cut at random; images of other splits are cut in the middle.
TRAINING = "train"


def broken_image(position: int, key: str, error: BrokenImageError) -> Broken:
    """What is told of a broken image."""
    return position, key, str(error)[:_MESSAGE_CHARACTERS]


class DecodingJob(BaseModel):
    """The folder of shards and the settings from which images are made."""

    model_config = ConfigDict(frozen=True)

    folder: Path
    seed: int
    images: Images
    scales: tuple[int, ...] = SCALES

    def shape(self, split: str, epoch: int) -> tuple[int, int, int]:
        """(height, width, channels) of an image."""
        size = size_at(self.images, epoch) if split == TRAINING else self.images.test_size
        return size, size, 3

    @property
    def dtype(self) -> np.dtype[Any]:
        """uint8, or float32 where the recipe wants images normalised."""
        return np.dtype(np.uint8 if self.images.as_bytes else np.float32)


class Decoder:
    """Makes images of one split of a folder of shards.

    Args:
        shards: the split, whose files stay open until the caller closes it.

    Attributes:
        nanoseconds: spent so far on each of :data:`STAGES`.
    """

    def __init__(self, job: DecodingJob, shards: Shards) -> None:
        self._job = job
        self.shards = shards
        self.random = _Random(job.seed)
        mean, deviation = (np.array(values, np.float32) for values in (job.images.mean, job.images.deviation))
        self._scale, self._shift = 1 / (255 * deviation), mean / deviation
        self._blank = mean_colour(job.images)
        self.nanoseconds: Counter[str] = Counter()

    def write(self, indices: Sequence[int], epoch: int, images: NDArray[Any]) -> list[Broken]:
        """Fill ``images``, of shape (N, height, width, 3), with those of ``indices``; returns the broken ones.

        Args:
            indices: sample indices, which may carry repetitions as in an epoch's order.

        Raises:
            HpctrainError: a shard cannot be read.
            Exception: any other fault, with a note that names the sample.
        """
        broken = []
        order = np.array(indices, np.int64)
        drawn = zip(sample_of(order).tolist(), repetition_of(order).tolist(), strict=True)
        for position, (index, repetition) in enumerate(drawn):
            passed = [time.perf_counter_ns()]
            place = images[position]
            as_bytes = place.dtype == np.uint8
            try:
                pixels = self._image(index, repetition, epoch, passed, place if as_bytes else None)
            except BrokenImageError as error:
                broken.append(broken_image(position, self.shards.key(index), error))
                pixels = np.broadcast_to(self._blank, images.shape[1:])
            except Exception as error:
                error.add_note(f"{self.shards.where(index)}: {self.shards.key(index)}")
                raise
            if not as_bytes:
                np.multiply(pixels, self._scale, out=place)
                place -= self._shift
            elif pixels is not place:
                place[:] = pixels
            passed.append(time.perf_counter_ns())
            # A broken image lacks stages; its time counts as reading or decoding.
            for stage, begin, end in zip(STAGES, passed, passed[1:], strict=False):
                self.nanoseconds[stage] += end - begin
        return broken

    def _image(self, index: int, repetition: int, epoch: int, passed: list[int], out: Pixels | None) -> Pixels:
        """An image, in ``out`` where that saves a copy; the time after each stage is appended to ``passed``."""
        images = self._job.images
        content = self.shards.read(index)
        passed.append(time.perf_counter_ns())
        if self.shards.split != TRAINING:
            part = validation_part(content, images, self._job.scales)
            passed.append(time.perf_counter_ns())
            image = middle(*part, images.test_size)
        else:
            random, size = self.random.of(epoch, index, repetition), size_at(images, epoch)
            pixels, flip = training_part(content, size, images, random, self._job.scales)
            passed.append(time.perf_counter_ns())
            image = changed(pixels, size, images, random, flip=flip, out=out)
        passed.append(time.perf_counter_ns())
        return image


class _Random:
    """The random numbers of each sample: Philox with the key (seed, epoch), from a counter for each sample.

    One generator is reset for each sample: making one takes four times as long, as it asks the system for entropy.
    """

    def __init__(self, seed: int) -> None:
        self._bits = np.random.Philox(key=seed)
        self._generator = np.random.Generator(self._bits)
        self._state = self._bits.state
        self._seed = seed

    def of(self, epoch: int, index: int, repetition: int) -> np.random.Generator:
        """The sample's generator, valid until the next call."""
        self._state["state"]["key"][:] = self._seed, epoch
        self._state["state"]["counter"][:] = 0, 0, index, repetition
        self._bits.state = self._state
        return self._generator
