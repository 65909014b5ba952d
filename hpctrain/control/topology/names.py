"""Reads hosts, devices and roles from the names of nodes."""

from __future__ import annotations

import re
from collections.abc import Collection

from hpctrain.control.topology.records import FabricNode

_AGGREGATION = "Aggregation Node"
# Quantum and Switch-IB chips show their SHARP engine as an adapter of this device.
_AGGREGATION_DEVICE = 0xCF09

_DIGITS = re.compile(r"([0-9]+)")
_HOST_AND_DEVICE = re.compile(r"(\S+)(?:\s+(\S*[0-9]))?")
# A description without the host's name, for lack of one when it was written (rdma-ndd's "%h %d").
_DEVICE = re.compile(r"(?:mlx[0-9]+_|hfi1_|HCA-)\w*")
# An adapter that was never told the host's name describes its product instead.
_PRODUCT = re.compile(r"\bMT[0-9]{4,}\b|Connect-?(?:X|IB)|InfiniHost|Technologies|HCA$", re.IGNORECASE)
# A managed switch wraps its host name: "MF0;leaf-01:MQM9701/U1"; a director names the chip instead of U1.
_MANAGED = re.compile(r"[A-Z0-9]+;([^;:]+):[^:/]+/U1")
_SERVICE = re.compile(
    r"(?:^|[^a-z])(?:c?ufm|opensm|sm|mgmt|mgt|mds|mdt|mgs|oss|ost|nsd|nas|storage)(?![a-z])", re.IGNORECASE
)
_MANAGER = re.compile(r"(?:^|[^a-z])(?:c?ufm|opensm|sm)(?![a-z])", re.IGNORECASE)

_GUID = re.compile(r"[0-9a-f]{16}")

# Default host names of installers.
UNNAMED_HOSTS = frozenset(("localhost", "ubuntu", "debian", "centos", "rocky", "linux", "(none)"))


def natural_key(name: str) -> list[str | int]:
    """A sort key that orders numbers in names by value: node2 before node10."""
    return [int(part) if place % 2 else part for place, part in enumerate(_DIGITS.split(name))]


def host_and_device(description: str) -> tuple[str | None, str]:
    """Host and device in an adapter's description such as ``node01 mlx5_0``; no host if it names a product or only a
    device.
    """
    match = _HOST_AND_DEVICE.fullmatch(description.strip())
    if match is None or _PRODUCT.search(match[1]) or (match[2] and _PRODUCT.search(match[2])):
        return None, description.strip()
    if match[2] is None and _DEVICE.fullmatch(match[1]):
        return None, match[1]
    return match[1], match[2] or ""


def is_guid(host: str) -> bool:
    """Whether a host is named by its adapter's GUID, for lack of a name."""
    return _GUID.fullmatch(host) is not None


def switch_name(description: str) -> str:
    """The name of a switch in its description, or the description if its form is unknown."""
    match = _MANAGED.fullmatch(description.strip())
    return match[1] if match else description.strip()


def is_aggregation_name(description: str) -> bool:
    """Whether a description is that of a switch's own SHARP engine."""
    return _AGGREGATION in description


def is_aggregation_node(node: FabricNode) -> bool:
    """Whether an adapter is a switch's own SHARP engine, which jobs cannot use."""
    return node.device_id == _AGGREGATION_DEVICE or is_aggregation_name(node.name)


def managers(hosts: Collection[str]) -> set[str]:
    """The hosts whose names say that they manage the fabric; none where half of all are called so."""
    managing = {host for host in hosts if _MANAGER.search(host)}
    return managing if 2 * len(managing) < len(set(hosts)) else set()


def is_service_host(host: str) -> bool:
    """Whether a host's name has a word for managing the fabric or storing files: ``ufm``, ``mds``, ``oss`` …"""
    return _SERVICE.search(host) is not None
