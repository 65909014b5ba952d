"""What a recipe's run draws: the first rank of each host reads its counters, and rank 0 records all of them."""

from __future__ import annotations

import time
from collections.abc import Callable

from hpctrain.common.run.events import EventWriter
from hpctrain.common.run.events.kinds import EnergyEvent
from hpctrain.worker.comm import Communicator
from hpctrain.worker.energy_meter import HostMeter

# Between two readings: a run that is killed loses at most as much.
_INTERVAL_SECONDS = 300.0


class RunEnergy:
    """The meters of a run's hosts.

    Args:
        meter: makes a meter of this host.
    """

    def __init__(self, comm: Communicator, events: EventWriter, meter: Callable[[], HostMeter] = HostMeter) -> None:
        self._comm = comm
        self._events = events
        self._make = meter
        self._meter: HostMeter | None = None
        self._next = 0.0
        # Without counters on any host, one empty event says so.
        self._recorded = False

    def begin(self) -> None:
        """Start counting, also where this rank has become its host's first because the former one died."""
        if self._comm.local_rank == 0 and self._meter is None:
            self._meter = self._make()
        self._next = time.monotonic() + _INTERVAL_SECONDS

    def close(self) -> None:
        """Stop counting."""
        if self._meter:
            self._meter.close()

    @property
    def due(self) -> bool:
        """Whether a reading is due by rank 0's clock; False on the other ranks."""
        return self._comm.rank == 0 and time.monotonic() >= self._next

    def record(self, iteration: int) -> None:
        """Record what has been drawn until the end of a step. Collective."""
        self.begin()
        own = (self._comm.host, self._meter.reading()) if self._meter else None
        hosts = dict(pair for pair in self._comm.allgather_object(own) if pair)
        if any(host.joules for host in hosts.values()) or not self._recorded:
            self._events.emit(EnergyEvent(iteration=iteration, hosts=hosts))
            self._recorded = True
