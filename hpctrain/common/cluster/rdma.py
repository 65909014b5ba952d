"""RDMA adapters and their ports, as the kernel lists them in ``/sys/class/infiniband``."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ADAPTERS = Path("/sys/class/infiniband")


@dataclass(frozen=True, kw_only=True)
class RdmaPort:
    """A port of an adapter.

    Attributes:
        link_layer: ``InfiniBand`` or ``Ethernet``, as sysfs says.
        state: the port's state in sysfs, such as ``ACTIVE``.
    """

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
