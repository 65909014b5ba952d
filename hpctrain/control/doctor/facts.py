"""The facts that the checks of one host use, read once from /sys, /proc, /dev and the process, under any root."""

from __future__ import annotations

import math
import os
import re
import resource
import shutil
import socket
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from hpctrain.common.cluster.interfaces import Interface, read_interfaces
from hpctrain.common.cluster.node_map import NodeMap
from hpctrain.common.cluster.rdma import all_ports, kernel_text
from hpctrain.control.launchers.shortages import TEMPORARY_BYTES, fault, mpirun_folder, socket_fault
from hpctrain.control.topology.live import this_node

_BRIDGE = re.compile(r"[0-9a-f]{4,}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")
_NO_GID = "0000:0000:0000:0000:0000:0000:0000:0000"
_READABLE_CONFIG = 256  # bytes; without privileges the kernel shows 64 or 256, and ACS lies behind
_ACS = 0x000D  # PCI Express Base Specification, extended capability "Access Control Services"
_ACS_SOURCE_VALIDATION = 0x1


@dataclass(frozen=True, kw_only=True)
class PortFacts:
    """A port of an RDMA adapter.

    Attributes:
        state: ``ACTIVE``, ``INIT``, ``DOWN`` … as the kernel names it.
        rate: Gbit/s, NaN where the kernel does not report it.
        roce_v2: the entries of its GID table that are set and of that kind, by index.
    """

    adapter: str
    number: int
    link_layer: str
    state: str
    rate: float
    roce_v2: tuple[int, ...] = ()

    def __str__(self) -> str:
        return f"{self.adapter}:{self.number}"


@dataclass(frozen=True, kw_only=True)
class Host:
    """One host as a rank, or the login shell, sees it.

    Attributes:
        ranks: how many ranks run on it.
        hosts: how many hosts the run has.
        memlock, nofile: soft and hard limit in bytes and files, infinite for none.
        shared_memory: bytes free in /dev/shm, None where there is none that can be written to.
        temporary: where mpirun and Python put their temporary files.
        temporary_fault: what is wrong with it, empty where nothing is.
        verbs: devices in /dev/infiniband that this process may open.
        driver: the version text of the GPU driver, empty without one.
        kernel: major and minor version of the Linux kernel.
        acs: bridges above GPUs on which ACS is enabled; None where the configuration space cannot be read.
        visible: ``CUDA_VISIBLE_DEVICES`` of each rank here, None where it is not set.
    """

    name: str
    environment: Mapping[str, str]
    ranks: int
    hosts: int
    memlock: tuple[float, float]
    nofile: tuple[float, float]
    shared_memory: int | None
    temporary: Path
    temporary_fault: str
    interfaces: tuple[Interface, ...]
    ports: tuple[PortFacts, ...]
    verbs: tuple[str, ...]
    node_map: NodeMap
    modules: frozenset[str]
    driver: str
    kernel: tuple[int, int]
    acs: tuple[str, ...] | None
    visible: tuple[str | None, ...]

    @property
    def active(self) -> tuple[PortFacts, ...]:
        """The RDMA ports that are up."""
        return tuple(port for port in self.ports if port.state == "ACTIVE")


def read_host(
    root: Path = Path("/"),
    environment: Mapping[str, str] = os.environ,
    *,
    ranks: int = 1,
    hosts: int = 1,
    visible: tuple[str | None, ...] | None = None,
) -> Host:
    """The facts of the host this runs on.

    Args:
        root: the folder that holds /sys, /proc and /dev.
        ranks, hosts: how many ranks run here, and how many hosts take part.
        visible: ``CUDA_VISIBLE_DEVICES`` of each rank here; by default all have that of ``environment``.

    Raises:
        HpctrainError: neither /sys nor lstopo.
    """
    node_map = this_node(root)
    gpus = [gpu.bus_id for gpu in node_map.gpus if gpu.bus_id]
    shared, temporary = root / "dev/shm", mpirun_folder(environment)
    return Host(
        # A local Slurm for tests, and a front end with aliases, give their nodes other names than the system.
        name=environment.get("SLURMD_NODENAME") or socket.gethostname(),
        environment=environment,
        ranks=ranks,
        hosts=hosts,
        memlock=_limit(resource.RLIMIT_MEMLOCK),
        nofile=_limit(resource.RLIMIT_NOFILE),
        shared_memory=None if fault(shared, 0) else shutil.disk_usage(shared).free,
        temporary=temporary,
        temporary_fault=fault(temporary, TEMPORARY_BYTES) or socket_fault(temporary),
        interfaces=tuple(read_interfaces(root)),
        ports=tuple(_ports(root)),
        verbs=tuple(_verbs(root)),
        node_map=node_map,
        modules=frozenset(line.split()[0] for line in kernel_text(root / "proc/modules").splitlines()),
        driver=kernel_text(root / "proc/driver/nvidia/version"),
        kernel=_kernel(root),
        acs=_acs(root, gpus),
        visible=visible if visible is not None else (environment.get("CUDA_VISIBLE_DEVICES"),) * ranks,
    )


def _limit(kind: int) -> tuple[float, float]:
    soft, hard = (math.inf if value == resource.RLIM_INFINITY else value for value in resource.getrlimit(kind))
    return soft, hard


def _kernel(root: Path) -> tuple[int, int]:
    version = re.match(r"(\d+)\.(\d+)", kernel_text(root / "proc/sys/kernel/osrelease"))
    return (int(version[1]), int(version[2])) if version else (0, 0)


def _verbs(root: Path) -> Iterator[str]:
    for path in sorted(root.glob("dev/infiniband/uverbs*")):
        if os.access(path, os.R_OK | os.W_OK):
            yield path.name


def _ports(root: Path) -> Iterator[PortFacts]:
    for port in all_ports(root / "sys/class/infiniband"):
        rate = re.match(r"[\d.]+", kernel_text(port.path / "rate"))
        yield PortFacts(
            adapter=port.adapter.name,
            number=port.number,
            link_layer=port.link_layer,
            state=port.state,
            rate=float(rate[0]) if rate else math.nan,
            roce_v2=tuple(_roce_v2(port.path)),
        )


def _roce_v2(port: Path) -> Iterator[int]:
    for gid in sorted(port.glob("gids/*"), key=lambda path: int(path.name)):
        if kernel_text(gid) not in ("", _NO_GID) and kernel_text(port / "gid_attrs/types" / gid.name) == "RoCE v2":
            yield int(gid.name)


def _acs(root: Path, gpus: list[str]) -> tuple[str, ...] | None:
    devices = root / "sys/bus/pci/devices"
    above = {part for gpu in gpus for part in (devices / gpu).resolve().parts[:-1] if _BRIDGE.fullmatch(part)}
    controls = {bridge: _acs_control(devices / bridge / "config") for bridge in sorted(above)}
    if None in controls.values():
        return None
    return tuple(bridge for bridge, control in controls.items() if control and control & _ACS_SOURCE_VALIDATION)


def _acs_control(config: Path) -> int | None:
    """The ACS control register of a PCI device; 0 without that capability, None where it cannot be read.

    Source: PCI Express Base Specification, extended capabilities: 16 bits of ID, 4 of version, 12 of the next offset.
    """
    try:
        space = config.read_bytes()
    except OSError:
        return None
    if len(space) <= _READABLE_CONFIG:
        return None
    offset = _READABLE_CONFIG
    # Capabilities may be in any order, so the number of steps is bounded by the size of the space.
    for _ in range(len(space) // 8):
        header = int.from_bytes(space[offset : offset + 4], "little")
        if header & 0xFFFF == _ACS:
            return int.from_bytes(space[offset + 6 : offset + 8], "little")
        offset = header >> 20
        if offset < _READABLE_CONFIG:
            break
    return 0
