"""Makes images from a folder of shards one by one, in a rank or in one of its workers."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from hpctrain.common.errors import HpctrainError
from hpctrain.common.recipes.sections import Images
from hpctrain.common.shards.decoding import BrokenImageError, Header, Pixels, look
from hpctrain.common.shards.image_shards import Shards
from hpctrain.worker.data.images import Crop, changed, decoded, middle, size_at, training_crop, validation_crop
from hpctrain.worker.data.sampling import Indices, repetition_of, sample_of

_MESSAGE_CHARACTERS = 200
# So many files are read, and their crops drawn, before the first of them is decoded: code that runs between decoding
# has left the processor's caches each time. When so many bytes are held, no more are read: files can be large.
_TOGETHER, _TOGETHER_BYTES = 16, 1 << 21
# The split whose images are cut at random; images of other splits are cut in the middle.
TRAINING = "train"


class Cut(NamedTuple):
    """What becomes of a photograph: ``crop`` is resized to ``width`` x ``height``, of which the middle is shown.

    ``random`` draws what else is changed. It is valid until so many more cuts are made as are made together.
    """

    position: int
    sample: int
    content: bytes | memoryview
    header: Header
    crop: Crop
    width: int
    height: int
    flip: bool
    random: np.random.Generator | None


@dataclass(kw_only=True)
class LoadedPiece:
    """Images that are computed together.

    Attributes:
        indices: sample indices with their repetitions.
        images: an array, or a tensor on a GPU, of shape (N, height, width, 3).
        cuts: what is to be made of each photograph, where a worker has only read it.
    """

    indices: Indices
    images: Any
    cuts: Sequence[Cut] = ()


@dataclass(frozen=True, kw_only=True)
class DecodingJob:
    """The folder of shards and the settings from which images are made; ``exact`` is of :func:`decoded`."""

    folder: Path
    seed: int
    images: Images
    exact: bool = False
    # Workers read photographs and draw their crops, and leave the rest to a GPU.
    only_reads: bool = False

    def shape(self, split: str, epoch: int) -> tuple[int, int, int]:
        """(height, width, channels) of an image."""
        size = size_at(self.images, epoch) if split == TRAINING else self.images.test_size
        return size, size, 3


class Decoder:
    """Makes images of one split of a folder of shards.

    Args:
        shards: the split, whose files stay open until the caller closes it.
    """

    def __init__(self, job: DecodingJob, shards: Shards) -> None:
        self._job = job
        self.shards = shards
        self._random = itertools.cycle([_Random(job.seed) for _ in range(_TOGETHER)])

    def write(self, indices: Sequence[int], epoch: int, images: Pixels) -> None:
        """Fill ``images``, of shape (N, height, width, 3), with those of ``indices``.

        Args:
            indices: sample indices, which may carry repetitions as in an epoch's order.

        Raises:
            HpctrainError: a shard cannot be read, or an image cannot be decoded.
            Exception: any other fault, with a note that names the sample.
        """
        cuts = self.cuts(np.array(indices, np.int64), epoch)
        while self._make(cuts, images):
            pass

    @contextlib.contextmanager
    def _named(self, index: int) -> Iterator[None]:
        """What fails within is that sample's fault."""
        try:
            yield
        except BrokenImageError as error:
            raise self.broken(index, error) from error
        except Exception as error:
            error.add_note(f"{self.shards.where(index)}: {self.shards.key(index)}")
            raise

    def broken(self, index: int, error: BrokenImageError) -> HpctrainError:
        """The error for an image that cannot be decoded."""
        return HpctrainError(
            "HT-data-broken-image",
            "{where}: {key} cannot be decoded: {reason}",
            f"it was whole when the shards were made: hpctrain data verify {self.shards.folder} finds the damage",
            exit_code=1,
            where=self.shards.where(index),
            key=self.shards.key(index),
            reason=str(error)[:_MESSAGE_CHARACTERS],
        )

    def cuts(self, indices: Indices, epoch: int) -> Iterator[Cut]:
        """Read photographs and draw their crops.

        Raises:
            HpctrainError: a shard cannot be read, or an image cannot be decoded.
            Exception: any other fault, with a note that names the sample.
        """
        drawn = zip(sample_of(indices).tolist(), repetition_of(indices).tolist(), strict=True)
        for position, (index, repetition) in enumerate(drawn):
            with self._named(index):
                # No name here is bound to what is read, which would be held while the next is read.
                yield self._cut(position, index, repetition, epoch)

    def _cut(self, position: int, index: int, repetition: int, epoch: int) -> Cut:
        images, content = self._job.images, self.shards.read(index)
        header = look(content)
        if self.shards.split != TRAINING:
            crop, width, height = validation_crop(header, images)
            return Cut(position, index, content, header, crop, width, height, flip=False, random=None)
        size, random = size_at(images, epoch), next(self._random).of(epoch, index, repetition)
        crop, flip = training_crop(header, images, random)
        return Cut(position, index, content, header, crop, size, size, flip, random)

    def _make(self, cuts: Iterator[Cut], images: Pixels) -> bool:
        """Make some of the images; returns whether there were any."""
        together = list(_together(cuts))
        for cut in together:
            with self._named(cut.sample):
                self._show(cut, images[cut.position])
        return bool(together)

    def _show(self, cut: Cut, place: Pixels) -> None:
        """Make an image. What is decoded for it is freed at the end: the next may take as much memory."""
        part = decoded(bytes(cut.content), cut.header, cut.crop, cut.width, cut.height, exact=self._job.exact)
        if cut.random:
            image = changed(part, cut.width, self._job.images, cut.random, flip=cut.flip, out=place)
        else:
            image = middle(part, cut.width, cut.height, len(place))
        if image is not place:
            place[:] = image


def _together(cuts: Iterator[Cut]) -> Iterator[Cut]:
    """The next that are made together."""
    held = 0
    for cut in itertools.islice(cuts, _TOGETHER):
        yield cut
        held += len(cut.content) + (0 if cut.header.pixels is None else cut.header.pixels.nbytes)
        if held > _TOGETHER_BYTES:
            return


class _Random:
    """The random numbers of each sample: Philox with the key (seed, epoch), from a counter for each sample.

    One generator is reset for each sample: making one takes four times as long, as it asks the system for entropy.
    """

    def __init__(self, seed: int) -> None:
        self._bits = np.random.Philox(key=seed)
        self._generator = np.random.Generator(self._bits)
        # Lists of Python's numbers are taken over in half the time of NumPy's.
        self._state: Any = {**self._bits.state, "buffer": [0] * 4}
        self._seed = seed

    def of(self, epoch: int, index: int, repetition: int) -> np.random.Generator:
        """The sample's generator, valid until the next call."""
        self._state["state"] = {"key": (self._seed, epoch), "counter": (0, 0, index, repetition)}
        self._bits.state = self._state
        return self._generator
