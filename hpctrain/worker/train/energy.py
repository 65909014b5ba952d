"""What a recipe's run draws: the first rank of each host reads its counters, and rank 0 records all of them."""

from __future__ import annotations

import time
from collections.abc import Callable

from hpctrain.common.run.events import EventWriter
from hpctrain.common.run.events.kinds import EnergyEvent
from hpctrain.worker.comm import Communicator
from hpctrain.worker.energy import HostMeter

# What a run that is killed may lose at most.
_SECONDS = 300.0


class RunEnergy:
    """The meters of a run's hosts.

    Args:
        comm: the ranks.
        events: where the readings are recorded.
        meter: makes a meter of this host.
    """

    def __init__(self, comm: Communicator, events: EventWriter, meter: Callable[[], HostMeter] = HostMeter) -> None:
        self._comm = comm
        self._events = events
        self._make = meter
        self._meter: HostMeter | None = None
        self._next = 0.0
        # That no host has a counter is told once.
        self._told = False

    def begin(self) -> None:
        """Count from now on. Also where the first rank of a host died and this one is the first now."""
        if self._comm.local_rank == 0 and self._meter is None:
            self._meter = self._make()
        self._next = time.monotonic() + _SECONDS

    def close(self) -> None:
        """Count no more."""
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
        if any(host.joules for host in hosts.values()) or not self._told:
            self._events.emit(EnergyEvent(iteration=iteration, hosts=hosts))
            self._told = True
