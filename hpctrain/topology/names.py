"""What the names that nodes give themselves say of them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from fnmatch import fnmatchcase

from hpctrain.topology.records import FabricNode

# Quantum and Switch-IB chips show their SHARP engine as an adapter of this device.
_AGGREGATION_DEVICE = 0xCF09

_DIGITS = re.compile(r"([0-9]+)")
_HOST_AND_DEVICE = re.compile(r"(\S+)(?:\s+(\S*[0-9]))?")
# An adapter whose driver has not told it the host's name gives its maker's.
_PRODUCT = re.compile(r"\bMT[0-9]{4,}\b|Connect-?(?:X|IB)|InfiniHost|Technologies|HCA$", re.IGNORECASE)
# A managed switch wraps its host name: "MF0;leaf-01:MQM9701/U1"; a director names the chip instead of U1.
_MANAGED = re.compile(r"[A-Z0-9]+;([^;:]+):[^:/]+/U1")
_SERVICE = re.compile(
    r"(?:^|[^a-z])(?:c?ufm|opensm|sm|mgmt|mgt|mds|mdt|mgs|oss|ost|nsd|nas|storage)(?![a-z])", re.IGNORECASE
)

_GUID = re.compile(r"[0-9a-f]{16}")

# What installers call a machine that nobody has named.
UNNAMED_HOSTS = frozenset(("localhost", "ubuntu", "debian", "centos", "rocky", "linux", "(none)"))


def natural(name: str) -> list[str | int]:
    """A key to sort names by in which numbers count as numbers: node2 before node10."""
    return [int(part) if place % 2 else part for place, part in enumerate(_DIGITS.split(name))]


def host_and_device(description: str) -> tuple[str | None, str]:
    """The host and the device of an adapter's description such as ``node01 mlx5_0``; no host in a product's name."""
    found = _HOST_AND_DEVICE.fullmatch(description.strip())
    if found is None or _PRODUCT.search(found[1]) or (found[2] and _PRODUCT.search(found[2])):
        return None, description.strip()
    return found[1], found[2] or ""


def is_guid(host: str) -> bool:
    """Whether a host goes by its adapter's GUID, having told no name."""
    return _GUID.fullmatch(host) is not None


def switch_name(description: str) -> str:
    """A switch's own name out of its description, which is kept where it has no known form."""
    found = _MANAGED.fullmatch(description.strip())
    return found[1] if found else description.strip()


def is_aggregation_node(node: FabricNode) -> bool:
    """Whether an adapter is a switch's own SHARP engine, which no job can use."""
    return node.device_id == _AGGREGATION_DEVICE or "Aggregation Node" in node.name


def is_service_host(host: str) -> bool:
    """Whether a host's name says that it manages the fabric or stores files: ``ufm``, ``mds``, ``oss`` … as a word."""
    return _SERVICE.search(host) is not None


class LeftOut:
    """The hosts that a user leaves out, by patterns (``*``, ``?``); keeps in mind which patterns matched any."""

    def __init__(self, patterns: Sequence[str]) -> None:
        self._matched = dict.fromkeys(patterns, False)

    def matches(self, host: str) -> bool:
        """Whether some pattern matches the host."""
        if not self._matched:
            return False
        matching = [pattern for pattern in self._matched if fnmatchcase(host, pattern)]
        self._matched.update(dict.fromkeys(matching, True))
        return bool(matching)

    def unmatched(self) -> list[str]:
        """A warning for each pattern that has matched nothing yet."""
        return [f"no host was left out for {pattern!r}" for pattern, matched in self._matched.items() if not matched]
