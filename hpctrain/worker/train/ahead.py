"""Takes the next samples of a stream while a device still computes on those before."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

from hpctrain.worker.data.samples import Samples


class SamplesAhead:
    """The samples of a stream, in its order.

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
        return self._fetched.pop() if self._fetched else next(self._placed)

    def fetch(self) -> None:
        """Take the next samples of the stream, if there are any; an error is raised where they are asked for."""
        if self._fetched or self._failed:
            return
        try:
            self._fetched.extend(itertools.islice(self._placed, 1))
        except Exception as error:
            self._failed = error
