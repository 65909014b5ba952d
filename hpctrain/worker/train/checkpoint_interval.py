"""How often a run with ``checkpoints.every_steps: auto`` saves its state."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from typing import Any

from hpctrain.common.run.events import Event, attempts
from hpctrain.common.run.events.kinds import EndEvent, ExcludedEvent, StoppedEvent

# The first checkpoint of an attempt comes after so long, to measure what one costs.
_FIRST_SECONDS = 60.0
# What is assumed between two failures as long as none was seen and none is stated.
_UNSEEN_SECONDS = 86400.0
# A checkpoint is written while the training goes on: for at most this part of the time, because others use the file
# system too.
_WRITING = 0.1


def interval_seconds(cost: float, mtbf: float, written: float = 0.0) -> float:
    """The time between two checkpoints that loses the least: sqrt(2 C M).

    J. W. Young, A first order approximation to the optimum checkpoint interval, Communications of the ACM 17 (1974),
    530-531. J. T. Daly, A higher order estimate of the optimum checkpoint interval for restart dumps, Future Generation
    Computer Systems 22 (2006), 303-312, adds terms that matter where C is no longer small against M, and takes M itself
    where C is large, which is the upper bound here.

    Args:
        cost: C, for how many seconds a save holds up the training.
        mtbf: M, the mean time between failures of the whole job in seconds.
        written: how many seconds it takes until a checkpoint is on disk, from which the lower bound follows.
    """
    return max(min(math.sqrt(2 * cost * mtbf), mtbf), written / _WRITING)


def failures_seen(events: Iterable[Event]) -> tuple[int, float]:
    """How many of a run's attempts before the last have failed, and how many seconds these have worked.

    An attempt that was stopped in good order has not failed: it has lost nothing.
    """
    # Jobs leave nodes out between attempts.
    past = attempts(event for event in events if not isinstance(event, ExcludedEvent))[:-1]
    failed = [not any(map(_in_good_order, attempt)) for attempt in past]
    # A clock may have been set back meanwhile.
    return sum(failed), sum(max(0.0, attempt[-1].time - attempt[0].time) for attempt in past)


def _in_good_order(event: Event) -> bool:
    return isinstance(event, StoppedEvent) or (isinstance(event, EndEvent) and event.status == "done")


class CheckpointInterval:
    """Measures what checkpoints cost, and says when the next one is due. Rank 0's decides for all ranks.

    Args:
        mtbf: the mean time between failures in seconds; None for what the run has seen.
        failures, worked: of :func:`failures_seen`.
    """

    def __init__(
        self,
        mtbf: float | None = None,
        failures: int = 0,
        worked: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._mtbf, self._failures, self._worked, self._clock = mtbf, failures, worked, clock
        self._begun = self._saved = clock()
        self._costs: list[float] = []
        self._seconds = _FIRST_SECONDS

    @property
    def due(self) -> bool:
        """Whether it is time to save."""
        return self._clock() - self._saved >= self._seconds

    def saved(self) -> None:
        """Count the time from now."""
        self._saved = self._clock()

    def measured(self, cost: float, written: float) -> dict[str, Any]:
        """Choose the interval after a checkpoint; returns what the event of the checkpoint says of it.

        Args:
            cost, written: as for :func:`interval_seconds`.
        """
        self._costs.append(cost)
        mtbf = self._mtbf
        if mtbf is None:
            worked = self._worked + self._clock() - self._begun
            mtbf = worked / self._failures if self._failures else _UNSEEN_SECONDS
        self._seconds = interval_seconds(sum(self._costs) / len(self._costs), mtbf, written)
        return {"interval_seconds": self._seconds, "mtbf_seconds": mtbf}
