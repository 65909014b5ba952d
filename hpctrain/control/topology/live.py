"""Reads the node map of this machine from the kernel's /sys, and from NVML for GPUs."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from hpctrain.common.cluster.adapter_kinds import LinkLayer, layer_of
from hpctrain.common.cluster.cores import numa_nodes
from hpctrain.common.cluster.gpus import opened_nvml
from hpctrain.common.cluster.interfaces import kernel_text, ports_of
from hpctrain.common.cluster.node_map import Adapter, Gpu, NodeMap
from hpctrain.common.errors import HpctrainError
from hpctrain.control.topology.pcie import Bridges, node_map_of_tree

_PCI = re.compile(r"pci[0-9a-f]{4,}:[0-9a-f]{2}|[0-9a-f]{4,}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")
_NVIDIA = "0x10de"
_DISPLAY = "0x03"


def this_node(root: Path = Path("/")) -> NodeMap:
    """The devices of this host that this process may use: its CPUs, and the GPUs that NVML shows.

    Without NVML (no driver library) the GPUs are those of the kernel's nvidia driver.

    Args:
        root: the folder with /sys and /proc; NVML, which knows only this machine, is used only for "/".

    Raises:
        HpctrainError: there is no /sys.
    """
    here = root == Path("/")
    sys = root / "sys"
    if not (sys / "devices/system/cpu").is_dir():
        raise HpctrainError(
            "HT-program-failed",
            "{path} lists no CPUs",
            "describe the host with a file: lstopo --of xml node.xml, then --node node.xml",
            path=sys,
        )
    gpus = (_nvml() if here else None) or _gpus_of_driver(sys)
    return node_map_of_tree(
        {
            Gpu(index=index, bus_id=bus_id, numa=_numa(device)): _bridges(device)
            for index, bus_id in enumerate(gpus)
            for device in [(sys / "bus/pci/devices" / bus_id).resolve()]
        },
        dict(_adapters(sys)),
        numa_nodes(root),
        where=str(sys),
    )


def _adapters(sys: Path) -> Iterator[tuple[Adapter, Bridges]]:
    for entry in sorted((sys / "class/infiniband").glob("*")):
        device = (entry / "device").resolve()
        # RDMA in software, over an Ethernet interface, has no PCI device.
        if not _bridges(device):
            continue
        layer, active = _ports(entry)
        yield (
            Adapter(
                name=entry.name,
                bus_id=device.name,
                numa=_numa(device),
                link_layer=layer,
                active=active,
                # In a virtual machine a virtual function has no such link, and counts as a whole adapter.
                virtual=(device / "physfn").exists(),
            ),
            _bridges(device),
        )


def _ports(entry: Path) -> tuple[LinkLayer | None, bool]:
    """InfiniBand if any port has it, else Ethernet; and whether a port of that kind is up.

    The kernel reports no link layer for EFA, which the adapter's name shows.
    """
    ports = ports_of(entry)
    layers = {port.link_layer for port in ports}
    layer: LinkLayer | None = None
    if "InfiniBand" in layers:
        layer = "InfiniBand"
    elif "Ethernet" in layers:
        layer = "Ethernet"
    return layer_of(entry.name, layer), any(port.active for port in ports if layer in (port.link_layer, None))


def _gpus_of_driver(sys: Path) -> list[str]:
    return sorted(
        device.name
        for device in (sys / "bus/pci/devices").glob("*")
        if kernel_text(device / "vendor") == _NVIDIA
        and kernel_text(device / "class").startswith(_DISPLAY)
        and (device / "driver").resolve().name == "nvidia"
    )


def _nvml() -> list[str] | None:
    """Bus IDs of the GPUs in NVML's order; None where there is no NVML."""
    with opened_nvml() as nvml:
        if nvml is None:
            return None
        devices = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
        places = map(nvml.nvmlDeviceGetPciInfo, devices)
        return [f"{pci.domain:04x}:{pci.bus:02x}:{pci.device:02x}.0" for pci in places]


def _bridges(device: Path) -> Bridges:
    """The host bridge and bridges in a device's path: /sys/devices/pci0000:3a/0000:3a:00.0/0000:3b:00.0."""
    return tuple(part for part in device.parts[:-1] if _PCI.fullmatch(part))


def _numa(device: Path) -> int | None:
    """The NUMA node of a device; None where the kernel says -1, because the firmware does not report it."""
    node = kernel_text(device / "numa_node")
    return int(node) if node.isdecimal() else None
