"""The energy that this host draws, as its GPUs' and its processors' own counters have it.

A GPU's counter is NVML's, which Volta and later have: millijoules since the driver was loaded, those of everybody on
that GPU. A processor's are RAPL's, in the files of the kernel's power capping framework: microjoules, from a range on
beginning again at 0, those of everybody on that processor. Since Linux 5.10 these are root's alone to read, unless the
host's administrator allows it.

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

from hpctrain.common.run.events.kinds import EnergySource, HostEnergy

POWERCAP = Path("/sys/class/powercap")

# The smallest range that processors have is 65 kJ, for which it would take more than 2 kW to go round in between.
_SECONDS = 30.0
# intel-rapl-mmio:0 is another way to read intel-rapl:0.
_ZONES = "intel-rapl:*"


@dataclass(kw_only=True)
class _Counter:
    """One counter; ``read`` returns joules, ``range`` is where it begins again."""

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
            # One without a range began at 0 again with its driver.
            drawn += self.range or self.last
        self.counted += drawn
        self.last = now


class HostMeter:
    """Adds up what this host draws from now on, in any thread. What cannot be read is told, and never guessed.

    Args:
        powercap: the folder of the kernel's power zones.
        environment: whose ``CUDA_VISIBLE_DEVICES`` names the GPUs.
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
        """Look no more by itself. Idempotent."""
        self._ended.set()

    def reading(self) -> HostEnergy:
        """What has been drawn since the meter was made."""
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
        """A counter that can be read no longer keeps what it had, which is told."""
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
            self._miss(f"{counter.name}: {when}{error.strerror}")
        except (ValueError, pynvml.NVMLError) as error:
            self._miss(f"{counter.name}: {when}{error}")
        else:
            return True
        return False

    def _miss(self, text: str) -> None:
        if text not in self._missing:
            self._missing.append(text)

    def _gpus(self, visible: str | None) -> Iterator[_Counter]:
        try:
            # For as long as the process lives: the counters are read to its end.
            pynvml.nvmlInit()
            devices = {index: pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())}
            uuids = {index: _text(pynvml.nvmlDeviceGetUUID(device)) for index, device in devices.items()}
        except pynvml.NVMLError as error:
            self._miss(f"GPUs: {error}")
            return
        for index in _visible(uuids, visible):

            def read(device: Any = devices[index]) -> float:
                return float(pynvml.nvmlDeviceGetTotalEnergyConsumption(device)) / 1e3

            yield _Counter(source="gpu", name=f"GPU {index}", read=read)

    def _zones(self, powercap: Path) -> Iterator[_Counter]:
        """Packages and DRAM: the parts of a package, and the platform that contains it, would count twice."""
        zones = sorted(powercap.glob(_ZONES))
        if not zones:
            self._miss(f"{powercap}: no {_ZONES}")
        for zone in zones:
            try:
                name = (zone / "name").read_text().strip()
                source = _source(name)
                if source is None:
                    continue
                reach = int((zone / "max_energy_range_uj").read_text()) / 1e6
            except (OSError, ValueError) as error:
                self._miss(f"{zone}: {getattr(error, 'strerror', None) or error}")
                continue

            def read(file: Path = zone / "energy_uj") -> float:
                return int(file.read_text()) / 1e6

            yield _Counter(source=source, name=f"{zone}/energy_uj", read=read, range=reach)


def _source(zone: str) -> EnergySource | None:
    # package-0, or package-0-die-1; a server's does not contain its DRAM.
    if zone.startswith("package-"):
        return "cpu"
    return "dram" if zone == "dram" else None


def _visible(uuids: Mapping[int, str], visible: str | None) -> list[int]:
    """The devices that CUDA_VISIBLE_DEVICES names, by number or the beginning of a UUID, up to the first that is none.

    NVML's numbers are by PCI address; where GPUs differ CUDA's are so only with CUDA_DEVICE_ORDER=PCI_BUS_ID. A part of
    a GPU (MIG) has no counter of its own.
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


def _text(value: str | bytes) -> str:
    # bytes in older versions of NVML's library for Python.
    return value.decode() if isinstance(value, bytes) else value
