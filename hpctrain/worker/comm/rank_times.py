"""Where a rank's time goes, and which ranks take longer than the others.

Ranks that train together all take as long as the slowest one, so that the time of a step does not tell which that is.
The time in which a rank does not wait for the others does: it computes then, or waits for its samples. The longest
tenth of the steps is left out, because one rank alone may evaluate or save now and then. A slow link makes all ranks
wait alike, so that a few messages between hosts measure it, where messages take a notable share of a step.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from statistics import median_low
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from hpctrain.common.run.events.kinds import SlowRankEvent

if TYPE_CHECKING:
    from hpctrain.worker.comm.base import Communicator

Seconds = NDArray[np.float64]

# A comparison is of at least so many steps, and of so many seconds.
_LEAST_STEPS, _LEAST_SECONDS = 10, 5.0
# A rank is slow if it takes longer than the median rank by this share of that one's time, by this share of a step, and
# by so many standard errors, as the steps of ranks that share their cores with others differ much.
_LONGER, _OF_STEP, _NOISE = 0.25, 0.05, 4.0
_MOST_RANKS = 3
# A link is slow if a message takes longer than over the median host's by this share of that one's time and by more than
# processors differ in, and if messages take more than the last share of a step.
_LINK_LONGER, _LINK_SECONDS, _NOTABLE = 1.0, 1e-4, 0.1
# The best of so many messages each way counts, as others delay some, and speed up none. At 1 Gbit/s all take 17 ms.
_MESSAGES, _MESSAGE_BYTES = 4, 256 << 10
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
    # In how many comparisons up to the last one, of so many ranks, a rank was slow by the same cause.
    _slow: dict[tuple[int, int, str], int] = field(default_factory=dict)

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

        Each is reported once a cause, until it is as fast as the others. Steps that are too few for a comparison count
        in the next one. Collective.
        """
        own = [0.0] * 6
        if self._steps:
            steps = np.sort(self._steps, axis=0)
            kept = steps[: math.ceil(0.9 * len(steps))]
            noise = np.hypot(*kept.std(axis=0)[1:]) / math.sqrt(len(kept))
            own = [*kept.mean(axis=0).tolist(), float(noise), float(steps[:, 0].sum()), len(steps)]
        # One message decides, so that ranks of which some have lost another one in it still agree on what comes next.
        hosts, table = zip(*comm.allgather_object((comm.host, own)), strict=True)
        whole, computing, samples, noise, seconds, count = np.array(table).T
        if count.min() < _LEAST_STEPS or seconds.max() < _LEAST_SECONDS:
            return []
        self._steps.clear()
        step_seconds = float(np.median(whole))
        noise = _NOISE * np.hypot(noise, np.median(noise))
        slow = slow_among(computing + samples, least=np.maximum(_OF_STEP * step_seconds, noise))
        reasons = {rank: _reason(rank, computing=computing, samples=samples) for rank in slow}
        # The rank that comes last waits for the messages alone.
        if comm.measures_links and len({*hosts}) > 2 and (whole - computing - samples).min() > _NOTABLE * step_seconds:
            # Messages take longer, too, on a host with too few cores.
            busy = {hosts[rank] for rank in slow}
            reasons |= {rank: reason for rank, reason in _slow_links(comm, hosts).items() if hosts[rank] not in busy}
        causes = [(comm.size, rank, reason["cause"]) for rank, reason in reasons.items()]
        self._slow = {cause: self._slow.get(cause, 0) + 1 for cause in causes}
        new = [cause for cause, comparisons in self._slow.items() if comparisons == 2]
        # Those beyond the limit are named after the next comparison.
        self._slow |= dict.fromkeys(new[_MOST_RANKS:], 1)
        ranks = [rank for _, rank, _ in new[:_MOST_RANKS]]
        return [SlowRankEvent(iteration=step, rank=rank, host=hosts[rank], **reasons[rank]) for rank in ranks]


def slow_among(own: Seconds, *, share: float = _LONGER, least: float | Seconds = 0.0) -> list[int]:
    """The ranks whose own seconds, of shape (ranks,), are longer than the median rank's by more than this share of that
    one's, and by more than ``least``; the slowest first.
    """
    longer = own - median_low(own.tolist())
    found = np.flatnonzero((longer > share * (own - longer)) & (longer > least))
    return sorted(found.tolist(), key=lambda rank: -own[rank])


def _slow_links(comm: Communicator, hosts: Sequence[str]) -> dict[int, dict[str, Any]]:
    """The first ranks of the hosts with slow links, with the keys of an event, on three hosts or more. Collective.

    Each host sends to its two neighbours in a ring of all hosts, to one after the other. A host's link is as slow as
    the better of its two ways out, or in, whichever takes longer: no host counts as slow for a neighbour's link or for
    a path to one neighbour alone.
    """
    ring = sorted({host: rank for rank, host in reversed([*enumerate(hosts)])}.values())
    came: dict[int, float] = {}
    for distance in (1, -1) * _MESSAGES:
        comm.barrier()
        if comm.rank in ring:
            place = ring.index(comm.rank)
            target, source = (ring[(place + step) % len(ring)] for step in (distance, -distance))
            seconds = comm.seconds_of_message(target, source, _MESSAGE_BYTES)
            came[source] = min(seconds, came.get(source, seconds))
    flows = comm.allgather_object(came)
    around = [(ring[place - 1], rank, ring[(place + 1) % len(ring)]) for place, rank in enumerate(ring)]
    link = np.array([max(min(flows[at].values()), min(flows[a][at], flows[b][at])) for a, at, b in around])
    return {
        ring[place]: _reason(place, link=link) for place in slow_among(link, share=_LINK_LONGER, least=_LINK_SECONDS)
    }


def _reason(place: int, **seconds: Seconds) -> dict[str, Any]:
    """What takes longer at a place of these arrays than at the median one: the keys of an event."""
    usual = {name: median_low(everyone.tolist()) for name, everyone in seconds.items()}
    cause = max(seconds, key=lambda name: seconds[name][place] - usual[name])
    return {"cause": cause, "seconds": float(seconds[cause][place]), "usual": usual[cause]}
