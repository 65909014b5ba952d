"""The RDMA adapters and network interfaces of this host, as its kernel shows them."""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ADAPTERS = Path("/sys/class/infiniband")


@dataclass(frozen=True, kw_only=True)
class RdmaPort:
    """A port of an adapter."""

    path: Path
    link_layer: str
    state: str

    @property
    def adapter(self) -> Path:
        """The folder of its adapter, which has the adapter's name."""
        return self.path.parents[1]

    @property
    def number(self) -> int:
        return int(self.path.name)

    def __str__(self) -> str:
        return f"{self.adapter.name}:{self.number}"

    @property
    def active(self) -> bool:
        """Whether it is up."""
        return self.state == "ACTIVE"


def ports_of(adapter: Path) -> list[RdmaPort]:
    """The ports of an adapter's folder, by number."""
    return [
        # "4: ACTIVE"
        RdmaPort(
            path=path, link_layer=kernel_text(path / "link_layer"), state=kernel_text(path / "state").rpartition(" ")[2]
        )
        for path in sorted(adapter.glob("ports/*"), key=lambda path: int(path.name))
    ]


def all_ports(adapters: Path = ADAPTERS) -> Iterator[RdmaPort]:
    """The ports of all adapters in a folder, adapter by adapter."""
    for adapter in sorted(adapters.glob("*")):
        yield from ports_of(adapter)


def kernel_text(path: Path) -> str:
    """The content of a kernel file; empty if it is missing or cannot be read, as the GIDs of a port that is down."""
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""


_LOOPBACK = "772"  # ARPHRD_LOOPBACK of the kernel's if_arp.h
_UP = 0x1  # IFF_UP of the kernel's if.h
# Interfaces that container engines and hypervisors make: their addresses are known on this host alone.
_HOST_ONLY = re.compile(r"docker|veth|virbr|vnet|br-|cni|cali|flannel|podman|lxcbr|lxdbr")


@dataclass(frozen=True, kw_only=True)
class Interface:
    """A network interface.

    Attributes:
        host_only: a bridge or port of containers or virtual machines, or the loopback: no other host reaches it.
        addresses: IPv4 and IPv6, without prefix lengths; empty under a root that is not this machine's.
        networks: those of its IPv4 addresses, such as ``10.77.0.0/24``; without those of the loopback, 127.0.0.0/8.
    """

    name: str
    up: bool
    host_only: bool
    addresses: tuple[str, ...] = ()
    networks: tuple[str, ...] = ()


def read_interfaces(root: Path = Path("/")) -> Iterator[Interface]:
    """All interfaces in the order of their names.

    Args:
        root: the directory that holds ``sys``, which tests replace.
    """
    # Imported here, because ranks that look at adapters alone need no psutil.
    import psutil

    known = psutil.net_if_addrs() if root == Path("/") else {}
    for entry in sorted((root / "sys/class/net").glob("*")):
        flags = kernel_text(entry / "flags")
        # A bridge without a network card in it joins virtual machines or containers.
        inner_bridge = (entry / "bridge").is_dir() and not any(entry.glob("brif/*/device"))
        found = [(a.family, a.address.partition("%")[0], a.netmask) for a in known.get(entry.name, ())]
        networks = (
            ipaddress.ip_network(f"{address}/{mask or 32}", strict=False)
            for family, address, mask in found
            if family == socket.AF_INET
        )
        yield Interface(
            name=entry.name,
            up=bool(int(flags, 16) & _UP) if flags else False,
            host_only=kernel_text(entry / "type") == _LOOPBACK or inner_bridge or bool(_HOST_ONLY.match(entry.name)),
            addresses=tuple(address for family, address, _ in found if family in (socket.AF_INET, socket.AF_INET6)),
            networks=tuple(str(network) for network in networks if not network.is_loopback),
        )
