"""The node map of a live machine: /sys trees built for the test, a stand-in for NVML, and this machine."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace

import pynvml
import pytest

from hpctrain.common.cluster.node_map import NumaNode, slots
from hpctrain.control.topology import live
from hpctrain.control.topology.live import this_node


class Machine:
    """A /sys and /proc with two NUMA nodes of two cores of two threads."""

    def __init__(self, root: Path, allowed: str = "0-7") -> None:
        self.root = root
        self.write("proc/self/status", f"Name:\tpython\nCpus_allowed:\tff\nCpus_allowed_list:\t{allowed}\nMems:\t1\n")
        for node, cpus in enumerate(("0-1,4-5", "2-3,6-7")):
            self.write(f"sys/devices/system/node/node{node}/cpulist", cpus)
        for cpu in range(8):
            siblings = f"{cpu % 4},{cpu % 4 + 4}"
            self.write(f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list", siblings)

    def write(self, path: str, text: str) -> None:
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text + "\n")

    def device(self, path: str, numa: int, **values: str) -> Path:
        device = self.root / "sys/devices" / path
        for name, value in {"numa_node": str(numa), **values}.items():
            self.write(f"sys/devices/{path}/{name}", value)
        link = self.root / "sys/bus/pci/devices" / device.name
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(device)
        return device

    def gpu(self, path: str, numa: int, driver: str = "nvidia") -> None:
        device = self.device(path, numa, vendor="0x10de", **{"class": "0x030200"})
        (device / "driver").symlink_to(self.root / "sys/bus/pci/drivers" / driver)

    def adapter(self, name: str, path: str, numa: int, *ports: tuple[str, str]) -> None:
        device = self.device(path, numa, vendor="0x15b3", **{"class": "0x020700"})
        for number, (layer, state) in enumerate(ports, start=1):
            self.write(f"sys/class/infiniband/{name}/ports/{number}/link_layer", layer)
            self.write(f"sys/class/infiniband/{name}/ports/{number}/state", state)
        (self.root / "sys/class/infiniband" / name / "device").symlink_to(device)


UP, DOWN = "4: ACTIVE", "1: DOWN"
SWITCH = "pci0000:3a/0000:3a:00.0/0000:3b:00.0"


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    """Two GPUs and an adapter on a switch of node 0, a GPU and two adapters on node 1, an Ethernet adapter."""
    machine = Machine(tmp_path)
    machine.gpu(f"{SWITCH}/0000:3c:04.0/0000:3d:00.0", 0)
    machine.gpu(f"{SWITCH}/0000:3c:08.0/0000:3e:00.0", 0)
    machine.gpu("pci0000:ae/0000:ae:00.0/0000:af:00.0", 1)
    machine.gpu("pci0000:ae/0000:ae:02.0/0000:b0:00.0", 1, driver="vfio-pci")
    machine.adapter("mlx5_0", f"{SWITCH}/0000:3c:0c.0/0000:3f:00.0", 0, ("InfiniBand", UP))
    machine.adapter("mlx5_1", "pci0000:ae/0000:ae:01.0/0000:b1:00.0", 1, ("InfiniBand", DOWN), ("Ethernet", UP))
    machine.adapter("mlx5_2", "pci0000:ae/0000:ae:03.0/0000:b2:00.0", 1, ("InfiniBand", DOWN), ("InfiniBand", UP))
    machine.adapter("mlx5_3", "pci0000:d7/0000:d7:00.0/0000:d8:00.0", -1, ("Ethernet", UP))
    machine.write("sys/class/infiniband/rxe0/ports/1/link_layer", "Ethernet")
    return machine


def test_a_machine_of_several_adapters(machine: Machine) -> None:
    node_map = this_node(machine.root)
    assert [(gpu.index, gpu.bus_id, gpu.numa) for gpu in node_map.gpus] == [
        (0, "0000:3d:00.0", 0),
        (1, "0000:3e:00.0", 0),
        (2, "0000:af:00.0", 1),
    ]
    assert [(a.name, a.numa, a.link_layer, a.active) for a in node_map.adapters] == [
        ("mlx5_0", 0, "InfiniBand", True),
        ("mlx5_1", 1, "InfiniBand", False),
        ("mlx5_2", 1, "InfiniBand", True),
        ("mlx5_3", None, "Ethernet", True),
    ]
    assert node_map.gpu_adapter == (
        ("PIX", "SYS", "SYS", "SYS"),
        ("PIX", "SYS", "SYS", "SYS"),
        ("SYS", "PHB", "PHB", "SYS"),
    )
    assert [(slot.adapter, slot.cores) for slot in slots(node_map, 3)] == [
        ("mlx5_0", (0,)),
        ("mlx5_0", (1,)),
        ("mlx5_2", (2, 3)),
    ]
    (warning,) = node_map.warnings
    assert warning.endswith("(2): mlx5_1 (down), mlx5_3 (Ethernet)")


def test_bonds_take_part_and_virtual_functions_do_not(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    machine.gpu("pci0000:3a/0000:3a:00.0/0000:3d:00.0", 0)
    machine.adapter("mlx5_bond_1", "pci0000:ae/0000:ae:01.0/0000:b1:00.0", 1, ("Ethernet", UP))
    for number in range(3):
        path = f"pci0000:3a/0000:3a:01.0/0000:3f:00.{number + 1}"
        machine.adapter(f"mlx5_{number}", path, 0, ("InfiniBand" if number else "Ethernet", UP))
        (tmp_path / "sys/devices" / path / "physfn").symlink_to(tmp_path / "sys/devices/pci0000:ae")
    node_map = this_node(tmp_path)
    assert [slot.adapter for slot in slots(node_map, 1)] == ["mlx5_bond_1"]
    (warning,) = node_map.warnings
    assert re.findall("mlx5_[0-9]", warning) == ["mlx5_0", "mlx5_1", "mlx5_2"]


def test_only_cores_that_the_process_may_use(tmp_path: Path) -> None:
    """The second thread alone of core 1, and core 3."""
    node_map = this_node(Machine(tmp_path, allowed="3,5,7").root)
    assert node_map.numa_nodes == (NumaNode(index=0, cores=(5,)), NumaNode(index=1, cores=(3,)))


class FakeNvml:
    """NVML with two GPUs, in the other order than /sys."""

    bus = (0xAF, 0x3D)

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.open = 0
        fakes = {
            "nvmlInit": self.init,
            "nvmlShutdown": self.shutdown,
            "nvmlDeviceGetCount": lambda: 2,
            "nvmlDeviceGetHandleByIndex": lambda index: index,
            "nvmlDeviceGetPciInfo": lambda device: self.pci(self.bus[device]),
        }
        for name, fake in fakes.items():
            monkeypatch.setattr(pynvml, name, fake)

    def init(self) -> None:
        self.open += 1

    def shutdown(self) -> None:
        self.open -= 1

    def pci(self, bus: int) -> SimpleNamespace:
        return SimpleNamespace(domain=0, bus=bus, device=0)


def test_gpus_of_nvml(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = FakeNvml(monkeypatch)
    assert live._nvml() == ["0000:af:00.0", "0000:3d:00.0"]
    assert nvml.open == 0
    monkeypatch.setattr(live, "Path", lambda _: machine.root)
    node_map = this_node(machine.root)
    assert [(gpu.index, gpu.bus_id, gpu.numa) for gpu in node_map.gpus] == [
        (0, "0000:af:00.0", 1),
        (1, "0000:3d:00.0", 0),
    ]
