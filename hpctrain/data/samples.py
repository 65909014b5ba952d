"""Samples in memory."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, kw_only=True)
class Samples:
    """Images and their classes.

    Attributes:
        images: float32 in 0 to 1, shape (N, height, width, channels).
        labels: int64, shape (N,).
    """

    images: NDArray[np.float32]
    labels: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, indices: slice | NDArray[np.int64]) -> Samples:
        return Samples(images=self.images[indices], labels=self.labels[indices])
