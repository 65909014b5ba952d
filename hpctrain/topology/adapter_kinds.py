"""Kinds of adapters by PCI identity and ports: InfiniBand or Ethernet, physical or virtual functions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

LinkLayer = Literal["InfiniBand", "Ethernet"]

# PCI classes, https://pci-ids.ucw.cz/read/PD. ConnectX-2 and TrueScale call themselves serial buses (0c06), Omni-Path a
# fabric (0208), ConnectX-3 some other network controller (0280).
INFINIBAND_CLASSES = ("0207", "0208", "0c06")
ETHERNET_CLASS = "0200"

# Vendor and device of the virtual functions of adapters with RDMA, https://pci-ids.ucw.cz.
_VIRTUAL_FUNCTIONS = {
    "15b3": ("1002", "1004", "1012", "1014", "1016", "1018", "101a", "101c", "101e", "a2d3"),
    "14e4": ("1606", "1609", "16c1", "16cb", "16d3", "16dc", "16e1", "16e5", "1806", "1807", "1808", "1809"),
    "1077": ("1664", "8090"),
    "8086": ("1889",),
    "1dd8": ("1003",),
}


@dataclass(frozen=True, slots=True)
class Port:
    """A port of an adapter.

    Attributes:
        lid: its LID; 0 for Ethernet, and for InfiniBand that no subnet manager has seen.
        active: whether it is up; None where the format does not tell.
    """

    lid: int
    active: bool | None


def link_layer(pci_class: str, ports: Sequence[Port]) -> LinkLayer | None:
    """The link layer of an adapter by its ports, else by its PCI class; None if neither is conclusive.

    Only a port of a subnet has a LID, and an InfiniBand port without one is not active.

    Args:
        pci_class: class and subclass, four hexadecimal digits.
        ports: those whose LID the format tells.
    """
    if any(port.lid for port in ports) or pci_class == "0207":
        return "InfiniBand"
    if pci_class == ETHERNET_CLASS or any(port.active for port in ports):
        return "Ethernet"
    return "InfiniBand" if pci_class in INFINIBAND_CLASSES else None


def is_virtual_function(vendor: str, device: str) -> bool:
    """Whether a PCI device (four hexadecimal digits each) is a virtual function of an adapter."""
    return device in _VIRTUAL_FUNCTIONS.get(vendor, ())
