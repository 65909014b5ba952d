"""How messages share links where ranks wait for nothing but their own: max-min fair, from one completion to the next.

``traffic.predict_allreduce`` lets a step begin when all ranks have ended the one before. For rings this makes no
difference: no message takes longer than on the slowest link at its full load, and that link is never idle. In
halving and doubling steps of different size and range run beside each other, which may be faster or slower.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from hpctrain.control.topology.fabric import Floats, Ints
from hpctrain.control.topology.routes import Phase, Routes

# Sums of fractions: times and shares closer than this are equal.
_ALIKE = 1e-9

_Numbers = NDArray[np.intp]


def max_min(flow: Ints | _Numbers, link: Ints | _Numbers, capacity: Floats, flows: int) -> Floats:
    """The rate of each flow where links are shared max-min fairly, by progressive filling (Bertsekas and Gallager, Data
    Networks, 1992, section 6.5.2).

    All rates grow alike until a link is full; the flows on it keep theirs, and the others go on.

    Args:
        flow, link: of each hop.
        capacity: of each link, bytes a second.
        flows: how many; one without a hop gets infinity.

    Returns:
        (flows,), bytes a second.
    """
    rate = np.full(flows, np.inf)
    left = capacity.astype(np.float64)
    while flow.size:
        load = np.bincount(link, minlength=len(left))
        used = np.flatnonzero(load)
        fair = left[used] / load[used]
        level = fair.min()
        full = np.zeros(len(left), np.bool_)
        full[used] = fair <= level * (1 + _ALIKE)
        kept = np.zeros(flows, np.bool_)
        kept[flow[full[link]]] = True
        rate[kept] = level
        settled = kept[flow]
        left -= level * np.bincount(link[settled], minlength=len(left))
        flow, link = flow[~settled], link[~settled]
    return rate


def overlapped_allreduce(routes: Routes, steps: Sequence[Phase], size: float) -> float:
    """Seconds of an all-reduce of ``size`` bytes whose ranks go on when their own messages are done.

    A message begins when its sender and its receiver have both ended the step before. Costs a solution of ``max_min``
    for each time at which messages end: meant for the few steps of halving and doubling, of which those of 128 hosts
    that share links take seconds to work out, and of 512 half a minute. Latencies are left out.

    Raises:
        HpctrainError: two adapters have no route.
    """
    messages = _Messages(routes, steps, size)
    seconds = 0.0
    while messages.going.size:
        seconds += messages.advance()
    return seconds


class _Messages:
    """The messages of all steps, and which of them are on their way.

    Attributes:
        going: numbers of those on their way.
    """

    def __init__(self, routes: Routes, steps: Sequence[Phase], size: float) -> None:
        parts = [phase for phase in steps for _ in range(phase.repeats)]
        source = np.concatenate([np.empty(0, np.int32), *(part.source for part in parts)])
        target = np.concatenate([np.empty(0, np.int32), *(part.target for part in parts)])
        paths = routes.paths(source, target)
        taken, link = np.unique(paths.link, return_inverse=True)
        self._start, self._link = paths.start, link
        self._capacity: Floats = routes.fabric.bandwidth[taken]
        self._left: Floats = np.concatenate([np.empty(0), *(np.full(len(p.source), size * p.share) for p in parts)])
        self._ends = np.stack([source, target], axis=1)
        # Of each adapter the messages of its steps, the next one last.
        self._steps: dict[int, list[list[int]]] = {adapter: [] for adapter in np.unique(self._ends).tolist()}
        first = 0
        for part in parts:
            own: dict[int, list[int]] = {}
            for number, ends in enumerate(self._ends[first : first + len(part.source)].tolist(), start=first):
                for end in ends:
                    own.setdefault(end, []).append(number)
            for adapter, numbers in own.items():
                self._steps[adapter].insert(0, numbers)
            first += len(part.source)
        self._waits_for = dict.fromkeys(self._steps, 0)
        self._missing = np.full(len(source), 2)
        self.going: _Numbers = np.array(self._next_steps(list(self._steps)), np.intp)

    def advance(self) -> float:
        """Up to the next message's end.

        Returns:
            seconds until then.
        """
        going = self.going
        counts = (self._start[1:] - self._start[:-1])[going]
        hops = np.repeat(self._start[going] - (np.cumsum(counts) - counts), counts) + np.arange(counts.sum())
        flow = np.repeat(np.arange(len(going)), counts)
        rate = max_min(flow, self._link[hops], self._capacity, len(going))
        needs = self._left[going] / rate
        seconds = float(needs.min())
        done = needs <= seconds * (1 + _ALIKE)
        self._left[going] *= 1 - np.divide(seconds, needs, out=np.ones_like(needs), where=needs > 0)
        ready = []
        for end in self._ends[going[done]].ravel().tolist():
            self._waits_for[end] -= 1
            if not self._waits_for[end]:
                ready.append(end)
        self.going = np.concatenate([going[~done], np.array(self._next_steps(ready), np.intp)])
        return seconds

    def _next_steps(self, adapters: Sequence[int]) -> list[int]:
        """Let adapters go on.

        Returns:
            the messages that can begin, since their other ends were waiting for them.
        """
        begin = []
        for adapter in adapters:
            if not self._steps[adapter]:
                continue
            numbers = self._steps[adapter].pop()
            self._waits_for[adapter] = len(numbers)
            for number in numbers:
                self._missing[number] -= 1
                if not self._missing[number]:
                    begin.append(number)
        return begin
