"""Samples, and the interface of their sources, however they are stored."""

from __future__ import annotations

import hashlib
from collections.abc import Generator, Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from hpctrain.worker.data.mixing import Mixture
from hpctrain.worker.data.sampling import Indices, sample_of

# The label of a sample that counts in neither loss nor accuracy.
NO_LABEL = -1


@dataclass(frozen=True, kw_only=True)
class Samples:
    """Images and their classes, or windows of text and the token after each of theirs.

    Attributes:
        images: shape (N, height, width, channels); float32 as the network takes them, or uint8, to be normalised by
            the recipe's mean and deviation. For text the tokens, int64, shape (N, T).
        labels: int64, shape (N,), for text (N, T); a sample's loss is the mean over its labels. A sample that a rank
            computes without having one of its own has the label :data:`NO_LABEL`.
        mixture: how the normalised images are mixed, if they are. That gives fewer samples if some images are only
            partners of others.
    """

    images: NDArray[np.float32] | NDArray[np.uint8] | NDArray[np.int64]
    labels: NDArray[np.int64]
    mixture: Mixture | None = None

    def __len__(self) -> int:
        return len(self.mixture.partners) if self.mixture else len(self.labels)

    def __getitem__(self, indices: slice | NDArray[np.int64]) -> Samples:
        return Samples(images=self.images[indices], labels=self.labels[indices])


class SampleSource(Protocol):
    """A set of samples, identified by indices from 0."""

    @property
    def fingerprint(self) -> str:
        """A text that differs for other samples, and for the same samples in another order."""

    def __len__(self) -> int: ...

    def stream(self, pieces: Iterable[Indices], epoch: int) -> Generator[Samples]:
        """The samples of each piece, in order, while later pieces are already being prepared.

        A sample's random numbers depend only on the recipe's seed, the epoch, the sample's index and its repetition
        (:func:`hpctrain.worker.data.sampling.repetition_of`). A stream that is closed early drops the pieces that it
        has prepared.

        Args:
            pieces: the indices of the samples to compute at once, never empty; they may carry repetitions.
            epoch: counted from 0; matters only to data that is augmented.

        Yields:
            Samples whose arrays are valid until the next ones are asked for.
        """

    def close(self) -> None:
        """End the workers of this source. Idempotent."""


@dataclass(frozen=True, kw_only=True)
class InMemory:
    """A :class:`SampleSource` of samples in memory."""

    samples: Samples

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 of images and labels."""
        return hashlib.sha256(self.samples.images.tobytes() + self.samples.labels.tobytes()).hexdigest()

    def __len__(self) -> int:
        return len(self.samples)

    def stream(self, pieces: Iterable[Indices], epoch: int) -> Generator[Samples]:
        """The samples of each piece."""
        return (self.samples[sample_of(piece)] for piece in pieces)

    def close(self) -> None:
        """Do nothing: there are no workers."""
