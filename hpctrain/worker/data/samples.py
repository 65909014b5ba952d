"""Samples in memory."""

from __future__ import annotations

import hashlib
from collections.abc import Generator, Iterable
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from hpctrain.worker.data.mixing import Mixture
from hpctrain.worker.data.sampling import Indices, sample_of

# The label of a sample that has no part in loss or accuracy.
BROKEN = -1


@dataclass(frozen=True, kw_only=True)
class Samples:
    """Images and their classes, or windows of text and the token after each of theirs.

    Attributes:
        images: shape (N, height, width, channels); float32 as the network takes them, or uint8, to be normalised by
            the recipe's mean and deviation. Of text the tokens, int64, shape (N, T).
        labels: int64, shape (N,), of text (N, T); :data:`BROKEN` where there is none. A sample's loss is the mean over
            its labels.
        mixture: what normalising makes of them, if they are mixed: fewer samples, where some are there
            for others alone.
        depths: what decides about each of them in each block of a network with stochastic depth, in 0 to 1.
    """

    images: NDArray[np.float32] | NDArray[np.uint8] | NDArray[np.int64]
    labels: NDArray[np.int64]
    mixture: Mixture | None = None
    depths: NDArray[np.float32] | None = None

    def __len__(self) -> int:
        return len(self.mixture.partners) if self.mixture else len(self.labels)

    def __getitem__(self, indices: slice | NDArray[np.int64]) -> Samples:
        return Samples(images=self.images[indices], labels=self.labels[indices])


@dataclass(frozen=True, kw_only=True)
class InMemory:
    """A :class:`hpctrain.worker.data.source.Source` of samples in memory."""

    samples: Samples
    broken: set[str] = field(default_factory=set)

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
