"""The interface of samples, however they are stored."""

from __future__ import annotations

from collections.abc import Generator, Iterable
from dataclasses import dataclass
from typing import Protocol

from hpctrain.worker.data.samples import Samples
from hpctrain.worker.data.sampling import Indices


class Source(Protocol):
    """A set of samples, identified by indices from 0."""

    @property
    def broken(self) -> set[str]:
        """Names of samples met so far by this rank that could not be decoded."""

    @property
    def fingerprint(self) -> str:
        """A text that differs for other samples, and for the same samples in another order."""

    def __len__(self) -> int: ...

    def stream(self, pieces: Iterable[Indices], epoch: int) -> Generator[Samples]:
        """The samples of each piece, in order, while later pieces are already being prepared.

        What is random about a sample follows from the recipe's seed, the epoch, the sample's index and the repetition
        that it is (:func:`hpctrain.worker.data.sampling.repetition_of`) alone. A stream that is closed before its end
        drops what it made ready. A sample that cannot be decoded has the label
        :data:`hpctrain.worker.data.samples.BROKEN`, and no part in loss or accuracy.

        Args:
            pieces: what is computed at once, none of them empty: indices, or parts of an epoch's order.
            epoch: from 0; for data that is not augmented it makes no difference.

        Yields:
            The arrays are good until the next one is asked for.
        """

    def close(self) -> None:
        """End the workers of this source. Idempotent."""


@dataclass(frozen=True, kw_only=True)
class First:
    """The first samples of a source. It owns the source."""

    source: Source
    count: int

    @property
    def broken(self) -> set[str]:
        """The broken samples of the source."""
        return self.source.broken

    @property
    def fingerprint(self) -> str:
        """The fingerprint of the source."""
        return self.source.fingerprint

    def __len__(self) -> int:
        return min(self.count, len(self.source))

    def stream(self, pieces: Iterable[Indices], epoch: int) -> Generator[Samples]:
        """The samples of each piece; no index is beyond the length."""
        return self.source.stream(pieces, epoch)

    def close(self) -> None:
        """Close the source."""
        self.source.close()
