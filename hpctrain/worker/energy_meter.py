"""The energy that this host draws, from the counters of its GPUs and processors, and what a recipe's run records of it.

A GPU's counter is NVML's, which Volta and later GPUs have: millijoules since the driver was loaded, for all processes
on that GPU. A processor's counters are RAPL's, in the files of the kernel's power capping framework: microjoules, for
all processes on that processor, starting again at 0 beyond a range. Since Linux 5.10 only root can read these, unless
the host's administrator allows others to.

Sources: https://docs.nvidia.com/deploy/nvml-api/group__nvmlDeviceQueries.html (nvmlDeviceGetTotalEnergyConsumption),
https://docs.kernel.org/power/powercap/powercap.html, Intel SDM volume 3, "RAPL Domains".
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pynvml

from hpctrain.common.cluster.gpus import only_gpu
from hpctrain.common.run.events import EventWriter
from hpctrain.common.run.events.kinds import EnergyEvent
from hpctrain.common.run.value_types import EnergySource, HostEnergy
from hpctrain.common.settings import SHARE_GPUS
from hpctrain.worker.comm import Communicator

POWERCAP = Path("/sys/class/powercap")

# The smallest range of a processor's counter is 65 kJ: it would take more than 2 kW to wrap around in this time.
_SECONDS = 30.0
# Between two readings: a run that is killed loses at most as much.
_INTERVAL_SECONDS = 300.0
# intel-rapl-mmio:0 is another way to read intel-rapl:0.
_ZONES = "intel-rapl:*"


@dataclass(kw_only=True)
class _Counter:
    """One counter; ``read`` returns joules, and the counter starts again at 0 beyond ``range``."""

    source: EnergySource
    name: str
    read: Callable[[], float]
    range: float | None = None
    last: float = 0.0
    counted: float = field(default=0.0, init=False)

    def look(self) -> None:
        """Add what has been drawn since the last look, which was less than one ``range``."""
        now = self.read()
        drawn = now - self.last
        if drawn < 0:
            # A counter without a range started again at 0 when its driver was loaded.
            drawn += self.range or self.last
        self.counted += drawn
        self.last = now


class HostMeter:
    """Adds up the energy that this host draws from now on. Counters that cannot be read are listed, never estimated.

    Args:
        powercap: the folder of the kernel's power zones.
        environment: the variables, of which ``CUDA_VISIBLE_DEVICES`` names the GPUs.
    """

    def __init__(self, *, powercap: Path = POWERCAP, environment: Mapping[str, str] = os.environ) -> None:
        self._missing: list[str] = []
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._began, self._begin = time.time(), time.monotonic()
        found = [*self._gpus(environment.get("CUDA_VISIBLE_DEVICES")), *self._zones(powercap)]
        self._counters = [counter for counter in found if self._first_look(counter)]
        if any(counter.range for counter in self._counters):
            threading.Thread(target=self._keep_looking, name="hpctrain-energy", daemon=True).start()

    def close(self) -> None:
        """Stop the thread that reads the counters regularly. Idempotent."""
        self._ended.set()

    def reading(self) -> HostEnergy:
        """The energy drawn since the meter was made."""
        with self._lock:
            self._look()
            joules: dict[EnergySource, float] = {}
            for counter in self._counters:
                joules[counter.source] = joules.get(counter.source, 0.0) + counter.counted
            seconds, missing = time.monotonic() - self._begin, tuple(self._missing)
            return HostEnergy(began=self._began, seconds=seconds, joules=joules, missing=missing)

    def _keep_looking(self) -> None:
        while not self._ended.wait(_SECONDS):
            with self._lock:
                self._look()

    def _look(self) -> None:
        """Read all counters. An unreadable counter keeps its last value, and is listed as missing."""
        for counter in self._counters:
            self._try(counter, counter.look, "no longer: ")

    def _first_look(self, counter: _Counter) -> bool:
        def begin() -> None:
            counter.last = counter.read()

        return self._try(counter, begin)

    def _try(self, counter: _Counter, look: Callable[[], None], when: str = "") -> bool:
        try:
            look()
        except OSError as error:
            self.miss(f"{counter.name}: {when}{error.strerror}")
        except (ValueError, pynvml.NVMLError) as error:
            self.miss(f"{counter.name}: {when}{error}")
        else:
            return True
        return False

    def miss(self, text: str) -> None:
        """List what is not counted."""
        if text not in self._missing:
            self._missing.append(text)

    def _gpus(self, visible: str | None) -> Iterator[_Counter]:
        try:
            # Never shut down, because the counters are read until the end of the process.
            pynvml.nvmlInit()
            devices = {index: pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())}
            uuids = {index: pynvml.nvmlDeviceGetUUID(device) for index, device in devices.items()}
        except pynvml.NVMLError as error:
            self.miss(f"GPUs: {error}")
            return
        for index in _visible(uuids, visible):

            def read(device: Any = devices[index]) -> float:
                return float(pynvml.nvmlDeviceGetTotalEnergyConsumption(device)) / 1e3

            yield _Counter(source="gpu", name=f"GPU {index}", read=read)

    def _zones(self, powercap: Path) -> Iterator[_Counter]:
        """The counters of packages and DRAM. Parts of a package, and the platform around it, would count twice."""
        zones = sorted(powercap.glob(_ZONES))
        if not zones:
            self.miss(f"{powercap}: no {_ZONES}")
        for zone in zones:
            try:
                name = (zone / "name").read_text().strip()
                source = _source(name)
                if source is None:
                    continue
                reach = int((zone / "max_energy_range_uj").read_text()) / 1e6
            except (OSError, ValueError) as error:
                self.miss(f"{zone}: {getattr(error, 'strerror', None) or error}")
                continue

            def read(file: Path = zone / "energy_uj") -> float:
                return int(file.read_text()) / 1e6

            yield _Counter(source=source, name=f"{zone}/energy_uj", read=read, range=reach)


class RunEnergy:
    """The meters of a run's hosts: the first rank of each reads its counters, and rank 0 records all of them.

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
            one_each = self._comm.local_size > 1 and not self._comm.in_host_memory and not SHARE_GPUS.read()
            if one_each and only_gpu():
                self._meter.miss("GPUs of the host's other ranks: each rank sees its own alone")
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


def _source(zone: str) -> EnergySource | None:
    # Named package-0 or package-0-die-1. On servers it does not include the DRAM.
    if zone.startswith("package-"):
        return "cpu"
    return "dram" if zone == "dram" else None


def _visible(uuids: Mapping[int, str], visible: str | None) -> list[int]:
    """The devices that CUDA_VISIBLE_DEVICES names by number or the beginning of a UUID, up to the first invalid name.

    NVML numbers GPUs by PCI address. On hosts with different GPUs, CUDA does so only with
    CUDA_DEVICE_ORDER=PCI_BUS_ID. A part of a GPU (MIG) has no counter of its own.
    Source: CUDA C++ Programming Guide, "CUDA Environment Variables".
    """
    if visible is None:
        return list(uuids)
    found: list[int] = []
    for name in (each.strip() for each in visible.split(",")):
        index = int(name) if name.isdecimal() else -1
        known = [each for each, uuid in uuids.items() if each == index or (name.startswith("GPU-") and name in uuid)]
        if not known:
            break
        found += known
    return list(dict.fromkeys(found))
