"""A /sys, /proc and /dev built for a test: two GPUs and an adapter on one PCIe switch, and what a test adds."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from hpctrain.control.doctor.host_facts import Host

SWITCH = "pci0000:3a/0000:3a:00.0/0000:3b:00.0"


class FakeMachine:
    """Files of the kernel, written one by one."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.write("proc/self/status", "Cpus_allowed_list:\t0-1")
        self.write("sys/devices/system/node/node0/cpulist", "0-1")
        self.write("sys/devices/system/cpu/online", "0-1")
        self.write("proc/sys/kernel/osrelease", "5.14.0-427.el9.x86_64")
        self.interface("lo", kind="772")
        self.interface("eth0")

    def write(self, path: str, text: str) -> None:
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text + "\n")

    def interface(self, name: str, *, up: bool = True, kind: str = "1") -> None:
        self.write(f"sys/class/net/{name}/type", kind)
        self.write(f"sys/class/net/{name}/flags", "0x1003" if up else "0x1002")

    def device(self, path: str, **values: str) -> Path:
        device = self.root / "sys/devices" / path
        for name, value in {"numa_node": "0", **values}.items():
            self.write(f"sys/devices/{path}/{name}", value)
        link = self.root / "sys/bus/pci/devices" / device.name
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(device)
        return device

    def gpu(self, path: str = f"{SWITCH}/0000:3c:04.0/0000:3d:00.0") -> None:
        device = self.device(path, vendor="0x10de", **{"class": "0x030200"})
        (device / "driver").symlink_to(self.root / "sys/bus/pci/drivers/nvidia")

    def adapter(
        self,
        name: str,
        path: str,
        *,
        layer: str = "InfiniBand",
        state: str = "4: ACTIVE",
        rate: str = "400 Gb/sec (4X NDR)",
    ) -> None:
        device = self.device(path, vendor="0x15b3", **{"class": "0x020700"})
        port = f"sys/class/infiniband/{name}/ports/1"
        for file, value in {"link_layer": layer, "state": state, "rate": rate}.items():
            self.write(f"{port}/{file}", value)
        (self.root / "sys/class/infiniband" / name / "device").symlink_to(device)

    def verbs(self) -> None:
        self.write("dev/infiniband/uverbs0", "")

    def host(self, ranks: int = 1, hosts: int = 1, changes: dict[str, Any] | None = None, **environment: str) -> Host:
        """What the checks see, with limits of a well-kept host, and ``changes`` of single facts."""
        host = Host(self.root, environment, ranks=ranks, hosts=hosts)
        good: dict[str, Any] = {
            "memlock": (math.inf, math.inf),
            "nofile": (65536.0, 65536.0),
            "shared_memory": 16 << 30,
        }
        vars(host).update({**good, **(changes or {})})
        return host


def full_machine(root: Path) -> FakeMachine:
    """A healthy host with GPUs and InfiniBand."""
    machine = FakeMachine(root)
    machine.gpu()
    machine.gpu(f"{SWITCH}/0000:3c:08.0/0000:3e:00.0")
    machine.adapter("mlx5_0", f"{SWITCH}/0000:3c:0c.0/0000:3f:00.0")
    machine.verbs()
    machine.write("proc/modules", "nvidia_peermem 16384 0 - Live 0x0\nib_uverbs 1 0 - Live 0x0")
    return machine
