"""Where a rank's time goes, and which ranks take longer than the others.

Ranks that train together all take as long as the slowest one, so that the time of a step does not tell which that is.
The time in which a rank does not wait for the others does: it computes then, or waits for its samples. The longest
tenth of the steps is left out, because one rank alone may evaluate or save now and then.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from statistics import mean, median_low
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from hpctrain.common.run.events.kinds import SlowRankEvent

if TYPE_CHECKING:
    from hpctrain.worker.comm.base import Communicator

# A comparison is of at least so many steps, and of so many seconds.
_LEAST_STEPS, _LEAST_SECONDS = 10, 5.0
# A rank is slow if it takes longer than the median rank by this share of that one's time, and by this share of a step.
_LONGER, _OF_STEP = 0.25, 0.05
_MOST_RANKS = 3
# Steps that are kept: a run may go on for days without a comparison, as that of a single rank does.
_MOST_STEPS = 10_000


@dataclass
class RankTimes:
    """The time of this rank's steps, by what it was spent on.

    Attributes:
        waiting, samples: seconds that the script has waited for other ranks, and for its own samples.
    """

    waiting: float = 0.0
    samples: float = 0.0
    # The end of the last step; None before the first, whose begin is not known.
    _begin: float | None = None
    _begun: tuple[float, float] = (0.0, 0.0)
    # Of the last steps since the last comparison: all of it, its computing, and its wait for samples.
    _steps: deque[tuple[float, float, float]] = field(default_factory=lambda: deque(maxlen=_MOST_STEPS))
    # The ranks that were slow in the last comparison, and those of them that were reported.
    _slow: frozenset[int] = frozenset()
    _reported: frozenset[int] = frozenset()
    _size: int = 0

    @contextlib.contextmanager
    def waits(self) -> Iterator[None]:
        """Count what is done within as waiting for other ranks. A wait within another one counts once."""
        begin, before = time.perf_counter(), self.waiting
        try:
            yield
        finally:
            self.waiting = before + time.perf_counter() - begin

    @contextlib.contextmanager
    def reads(self) -> Iterator[None]:
        """Count what is done within as waiting for samples, but for the waits for other ranks in it."""
        begin, before = time.perf_counter(), self.waiting
        try:
            yield
        finally:
            self.samples += time.perf_counter() - begin - (self.waiting - before)

    def step_done(self) -> None:
        """Count a step, from the end of the one before until now."""
        now = time.perf_counter()
        waited, read = self.waiting - self._begun[0], self.samples - self._begun[1]
        if self._begin is not None:
            self._steps.append((now - self._begin, now - self._begin - waited - read, read))
        self._begin, self._begun = now, (self.waiting, self.samples)

    def slow_ranks(self, comm: Communicator, step: int) -> list[SlowRankEvent]:
        """The ranks that took longer than the others in this comparison and in the one before, at most three of them.

        Each is reported once, until it is as fast as the others. Steps that are too few for a comparison count in the
        next one. Collective.
        """
        own = (0.0,) * 5
        if self._steps:
            whole, computing, reading = zip(*self._steps, strict=True)
            own = _mean(computing), _mean(reading), _mean(whole), sum(whole), len(whole)
        # One message, so that ranks of which some have lost another one in it still agree on what comes next.
        hosts, table = zip(*comm.allgather_object((comm.host, own)), strict=True)
        computing, samples, whole, seconds, count = np.array(table).T
        if count.min() < _LEAST_STEPS or seconds.max() < _LEAST_SECONDS:
            return []
        self._steps.clear()
        if comm.size != self._size:  # ranks that are left have other numbers
            self._size, self._slow, self._reported = comm.size, frozenset(), frozenset()
        slow = slow_among(computing + samples, float(np.median(whole)))
        lasting = [rank for rank in slow if rank in self._slow]
        new = [rank for rank in lasting if rank not in self._reported][:_MOST_RANKS]
        self._slow, self._reported = frozenset(slow), frozenset(lasting)
        return [
            SlowRankEvent(iteration=step, rank=rank, host=hosts[rank], **_reason(rank, computing, samples))
            for rank in new
        ]


def _mean(seconds: Sequence[float]) -> float:
    """The mean without the longest tenth."""
    return mean(sorted(seconds)[: math.ceil(0.9 * len(seconds))])


def slow_among(own: NDArray[np.float64], step: float) -> list[int]:
    """The ranks whose own time is longer than the median rank's, the slowest first.

    ``own`` has the seconds of a ``step`` in which a rank does not wait for the others, shape (ranks,).
    """
    longer = own - median_low(own.tolist())
    found = np.flatnonzero((longer > _LONGER * (own - longer)) & (longer > _OF_STEP * step))
    return sorted(found.tolist(), key=lambda rank: -own[rank])


def _reason(rank: int, computing: NDArray[np.float64], samples: NDArray[np.float64]) -> dict[str, Any]:
    """What of a rank takes longer: the keys of an event."""
    usual = {"computing": median_low(computing.tolist()), "samples": median_low(samples.tolist())}
    taken = {"computing": float(computing[rank]), "samples": float(samples[rank])}
    cause = max(taken, key=lambda name: taken[name] - usual[name])
    return {"cause": cause, "seconds": taken[cause], "usual": usual[cause]}
