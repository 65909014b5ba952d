"""The counters of a host: processors in files as the kernel lays them out, GPUs by functions of NVML."""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pynvml
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.common.run.value_types import HostEnergy
from hpctrain.worker import energy_meter as energy
from hpctrain.worker.energy_meter import HostMeter
from support.power_zones import RANGE, SERVER, PowerZones


@pytest.fixture
def zones(tmp_path: Path) -> PowerZones:
    return PowerZones(tmp_path, SERVER)


def _places(reading: HostEnergy) -> list[str]:
    """The counters that cannot be read, without the reasons."""
    return [text.partition(": ")[0] for text in reading.missing]


def no_driver() -> None:
    raise pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)


@pytest.fixture(autouse=True)
def driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pynvml, "nvmlInit", no_driver)


def test_packages_and_dram_are_counted_once(zones: PowerZones) -> None:
    for number in SERVER:
        zones.set(number, 5_000_000)
    meter = HostMeter(powercap=zones.root)
    assert meter.reading().joules == {"cpu": 0, "dram": 0}
    # psys and core hold or are held by packages.
    for step, number in enumerate(SERVER):
        zones.set(number, 5_000_000 + 10**step * 1_000_000)
    reading = meter.reading()
    meter.close()
    assert reading.joules == {"cpu": pytest.approx(1 + 1000), "dram": pytest.approx(100 + 10_000)}
    assert _places(reading) == ["GPUs"]
    assert reading.seconds >= 0


@pytest.mark.slow
@given(
    begin=st.integers(0, RANGE - 1),
    drawn=st.lists(st.integers(0, RANGE - 1), max_size=8),
)
def test_a_counter_that_begins_again(begin: int, drawn: list[int]) -> None:
    """Between two looks it may go round once; the sum is that of a counter without a range."""
    with tempfile.TemporaryDirectory() as folder:
        zones, shown = PowerZones(Path(folder), {"0": "package-0"}), begin
        zones.set("0", shown)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(pynvml, "nvmlInit", no_driver)
            meter = HostMeter(powercap=zones.root)
            for each in drawn:
                shown += each
                zones.set("0", shown)
                last = meter.reading()
            last = meter.reading()
        meter.close()
        assert last.joules["cpu"] == pytest.approx(sum(drawn) / 1e6, abs=1e-6)


def test_it_looks_often_enough_by_itself(zones: PowerZones, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody asks while the counter goes round twice."""
    monkeypatch.setattr(energy, "_SECONDS", 0.01)
    meter = HostMeter(powercap=zones.root)
    looked = threading.Event()
    look = meter._look

    def tell() -> None:
        look()
        looked.set()

    monkeypatch.setattr(meter, "_look", tell)
    for part in range(1, 5):
        zones.set("0", part * RANGE // 2 + 7_000_000)
        looked.clear()
        assert looked.wait(10)
        looked.clear()
        assert looked.wait(10)
    assert meter.reading().joules["cpu"] == pytest.approx((2 * RANGE + 7_000_000) / 1e6)
    meter.close()


def test_a_counter_that_cannot_be_read(zones: PowerZones) -> None:
    # As root may read every file, it is none.
    zones.file("0:1").unlink()
    zones.file("0:1").mkdir()
    (zones.root / "intel-rapl:1" / "max_energy_range_uj").unlink()
    zones.file("1:0").write_text("\n")
    meter = HostMeter(powercap=zones.root)
    zones.set("0", 3_000_000)
    reading = meter.reading()
    assert reading.joules == {"cpu": 3}
    assert {str(zones.file("0:1")), f"{zones.root}/intel-rapl:1", str(zones.file("1:0"))} < {*_places(reading)}
    zones.file("0").unlink()
    for _ in range(2):
        reading = meter.reading()
        assert reading.joules == {"cpu": 3}
        assert reading.missing[-1].startswith(f"{zones.file('0')}: no longer: ")
    assert len(reading.missing) == 5
    meter.close()


class Gpus:
    """A driver's counters, in millijoules."""

    def __init__(self, counters: list[int]) -> None:
        self.counters = counters

    def total(self, index: int) -> int:
        if self.counters[index] < 0:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        return self.counters[index]


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gpus]:
    found = Gpus([1_000, 2_000, 3_000, 4_000])
    monkeypatch.setattr(pynvml, "nvmlInit", lambda: None)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetCount", lambda: len(found.counters))
    monkeypatch.setattr(pynvml, "nvmlDeviceGetHandleByIndex", lambda index: index)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetUUID", lambda index: f"GPU-{index}a-bcd")
    monkeypatch.setattr(pynvml, "nvmlDeviceGetTotalEnergyConsumption", found.total)
    return found


@pytest.mark.parametrize(
    ("visible", "joules"),
    [
        (None, 1 + 2 + 4 + 8),
        ("0,2", 1 + 4),
        ("2,2", 4),
        ("1,-1,3", 2),
        ("", None),
        ("GPU-3a,GPU-0a-bcd", 1 + 8),
        ("MIG-3a", None),
    ],
)
def test_the_gpus_that_cuda_shows(gpus: Gpus, tmp_path: Path, visible: str | None, joules: float | None) -> None:
    environment = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    meter = HostMeter(powercap=tmp_path, environment=environment)
    gpus.counters = [each + 2**index * 1000 for index, each in enumerate(gpus.counters)]
    assert meter.reading().joules == ({} if joules is None else {"gpu": pytest.approx(joules)})


def test_a_gpu_without_a_counter(gpus: Gpus, tmp_path: Path) -> None:
    gpus.counters[1] = -1
    meter = HostMeter(powercap=tmp_path, environment={})
    gpus.counters = [2_000, -1, 3_000, -1]
    reading = meter.reading()
    assert reading.joules == {"gpu": pytest.approx(1)}
    assert "GPU 1" in _places(reading)
    assert reading.missing[-1].startswith("GPU 3: no longer: ")
    # Its driver was loaded anew.
    gpus.counters = [500, -1, 3_000, 4_250]
    assert meter.reading().joules == {"gpu": pytest.approx(1 + 0.5 + 0.25)}
