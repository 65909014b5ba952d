"""Kinds of adapters by PCI identity, ports and names: their link layer, and physical or virtual functions."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

LinkLayer = Literal["InfiniBand", "Ethernet", "EFA", "Slingshot", "iWARP", "usNIC"]

# Adapters of these networks have no verbs that NCCL or UCX could use: both reach them through libfabric, which chooses
# the adapters itself (https://github.com/aws/aws-ofi-nccl).
LIBFABRIC: tuple[LinkLayer, ...] = ("EFA", "Slingshot")
# RDMA devices that neither NCCL nor UCX uses: they lack the connections that both make.
UNUSED: tuple[LinkLayer, ...] = ("iWARP", "usNIC")

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


# The beginnings of device names by their link layer. rdma-core names devices by it: ibp1s0, rocep1s0, iwp1s0, usp1s0,
# opap1s0, and rdmap1s0 where the kernel does not tell, which is EFA (kernel-boot/rdma_rename.c). The kernel's own
# names are those of drivers, some of which know Ethernet only. Azure's images name mlx5_ib0 and mlx5_an0 (accelerated
# networking).
_NAMES: tuple[tuple[LinkLayer, str], ...] = (
    ("EFA", r"rdmap|efa"),
    ("Slingshot", r"cxi|hs[in][0-9]"),
    ("usNIC", r"usnic|us[bosp][0-9]"),
    ("iWARP", r"iw|i40iw|cxgb[34]_|nes[0-9]|siw"),
    ("InfiniBand", r"ib|opa|hfi1_|mlx5_ib"),
    ("Ethernet", r".*bond|roce|eth|en|mlx5_an|bnxt_re|irdma|qedr|erdma|mana_|hns_|rxe"),
)
# What NCCL calls a device: rail0_dma is rail0 through its data-direct function, mlx5_0+mlx5_1 are two merged.
# Source: ncclIbInitDevices and ncclIbMakeVDeviceInternal of NCCL's src/transport/net_ib/init.cc.
_DEVICE = re.compile(r"(?!NIC[0-9])([A-Za-z][\w.-]*?)(?:_dma)?(:[0-9]{1,3})?", re.ASCII)


def link_layer_of_name(name: str) -> LinkLayer | None:
    """The link layer that a device's name suggests, if any. Only Ethernet ports are bonded: ``mlx5_bond_0``."""
    return next((layer for layer, names in _NAMES if re.match(names, name)), None)


def layer_of(name: str, known: LinkLayer | None) -> LinkLayer | None:
    """The link layer of a device, of which its PCI class and its ports say ``known``: its name may say more where these
    are Ethernet's, and says something where they say nothing.
    """
    by_name = link_layer_of_name(name)
    return by_name if by_name in (*LIBFABRIC, *UNUSED) else known or by_name


def verbs_devices(name: str) -> tuple[str, ...]:
    """The devices, with a port where it is named, behind a name that NCCL or ``nvidia-smi`` prints.

    Empty where it names none: some formats know bus IDs only, and nvidia-smi without its legend NIC0.
    """
    found = [_DEVICE.fullmatch(part) for part in name.split("+")]
    return tuple(f"{match[1]}{match[2] or ''}" for match in found if match) if all(found) else ()


def link_layer_of_vendor(vendor: str, device: str) -> LinkLayer | None:
    """The link layer of adapters that call themselves Ethernet and are not, by four hexadecimal digits each.

    Source: https://pci-ids.ucw.cz; Cassini is Slingshot's adapter.
    """
    if vendor == "1d0f" and device.startswith("efa"):
        return "EFA"
    return "Slingshot" if vendor == "17db" or (vendor, device) == ("1590", "0371") else None


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
