"""The output of ``iblinkinfo`` and ``iblinkinfo --line`` (infiniband-diags): every port with its state and peer."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from hpctrain.common.errors import HpctrainError
from hpctrain.control.topology.names import is_aggregation_name, is_switch_name
from hpctrain.control.topology.readers.listing import Listing
from hpctrain.control.topology.records import FabricNode, Link, Record, Remark

_HEADING = re.compile(r"(?:(?P<other>CA|Router): (?P<name>.*)|Switch: 0x(?P<guid>[0-9a-f]{16}) (?P<switch>.*)):\s*")
_ROW = re.compile(
    r'\s*(?:0x(?P<guid>[0-9a-f]{16})\s+)?(?:"\s*(?P<name>.*?)"\s+)?(?P<lid>[0-9]{1,5})\s+(?P<port>[0-9]{1,3})'
    r"\[[ 0-9]*\]\s+==\((?P<state>.*?)\)==>\s+(?:(?:0x(?P<peer>[0-9a-f]{16})\s+)?(?P<peer_lid>[0-9]{1,5})?\s+"
    r'(?P<peer_port>[0-9]{1,3})?\[[ 0-9]*\]\s+"(?P<peer_name>.*)" \(.*\)|"Port not available")\s*'
)
# Of an adapter.
_MOST_PORTS = 2
_LANES = re.compile(r"\s*([0-9]{1,2})X\s+([0-9.]+) Gbps( \(FDR10\))?")
# Signalling rate of a lane as libibmad prints it.
_SPEEDS = {
    "2.5": "SDR",
    "5.0": "DDR",
    "10.0": "QDR",
    "14.0625": "FDR",
    "25.78125": "EDR",
    "53.125": "HDR",
    "106.25": "NDR",
    "212.5": "XDR",
}


Kind = Literal["switch", "adapter"]


@dataclass(frozen=True, slots=True)
class _Port:
    """One row, with the GUID that identifies its node in the file."""

    guid: str
    name: str
    kind: Kind | Literal["router"] | None
    row: re.Match[str]
    where: str
    lanes: tuple[int | None, str | None]


def read(text: str, where: str) -> Iterator[Record]:
    """Nodes, then their cable ends.

    The format identifies an adapter by its port's GUID, so each port becomes a separate adapter. The default output
    names the other end of a cable only by its LID, which must belong to a node of the file, except in the output of
    ``--switches-only``, whose adapters get their LID, written as a GUID. ``--line`` does not distinguish switches from
    adapters: a node with several ports is a switch, since an adapter's GUID here is that of one port, and so is one
    with a port or a name as only switches have. Routers and the cables to them are skipped; ``--line`` and
    ``--switches-only`` do not tell them from adapters.

    Raises:
        HpctrainError: the text is not such an output, a line of it is damaged or cut off, or the other end of a cable
            is named by a LID that several nodes have.
    """
    listing = Listing(text, where, "iblinkinfo")
    ports = list(_ports(listing))
    if not ports:
        raise listing.fault("HT-fabric-unknown-format", "no port in it: not the output of iblinkinfo", 1)
    by_lid = _by_lid(listing, ports)
    routers = {port.guid for port in ports if port.kind == "router"}
    ports = [port for port in ports if port.guid not in routers and _peer(port, by_lid) not in routers]
    nodes = _nodes(ports)
    if any(node.kind == "adapter" for node in nodes.values()):
        up = [port for port in ports if _is_up(port) and not is_aggregation_name(port.row["peer_name"])]
        missing = [port.where for port in up if _peer(port, by_lid) not in nodes]
        if missing:
            raise listing.cut_off(len(missing), missing[0])
    else:
        yield from _adapters_by_lid(ports, by_lid, nodes)
    yield from nodes.values()
    for port in ports:
        row = port.row
        yield Link(
            guid=port.guid,
            port=int(row["port"]),
            peer=_peer(port, by_lid) if _is_up(port) else None,
            peer_port=int(row["peer_port"]) if _is_up(port) else None,
            lid=int(row["lid"]) if nodes[port.guid].kind == "adapter" else None,
            width=port.lanes[0],
            speed=port.lanes[1],
            where=port.where,
        )
    yield from listing.remarks()


def _ports(listing: Listing) -> Iterator[_Port]:
    heading: re.Match[str] | None = None
    for number, line in listing:
        if found := _HEADING.fullmatch(line):
            heading = found
        elif "==(" in line:
            row = _ROW.fullmatch(line)
            if row is None:
                raise listing.fault("HT-fabric-file-damaged", "not a port as iblinkinfo lists it", number, line)
            yield _port(listing, number, row, heading)
        else:
            listing.pass_over(number, line)


def _port(listing: Listing, number: int, row: re.Match[str], heading: re.Match[str] | None) -> _Port:
    at = f"{listing.where}:{number}"
    lanes: tuple[int | None, str | None] = (None, None)
    if found := _LANES.match(row["state"]):
        if found[2] not in _SPEEDS:
            raise listing.fault(
                "HT-fabric-file-damaged",
                "a lane of {speed} Gbps is not one of {valid}",
                number,
                speed=found[2],
                valid=", ".join(_SPEEDS),
            )
        lanes = int(found[1]), "FDR10" if found[3] else _SPEEDS[found[2]]
    if (row["peer_lid"] is None) != (row["peer_port"] is None):
        raise listing.fault(
            "HT-fabric-file-damaged", "the other end has a LID without a port, or a port without a LID", number
        )
    if row["name"] is not None and row["guid"]:
        return _Port(row["guid"], row["name"], None, row, at, lanes)
    if heading is None:
        raise listing.fault("HT-fabric-file-damaged", "a port before any node", number, row.string)
    if heading["guid"]:
        return _Port(heading["guid"], heading["switch"], "switch", row, at, lanes)
    if not row["guid"]:
        raise listing.fault("HT-fabric-file-damaged", "a port of an adapter without its GUID", number, row.string)
    return _Port(row["guid"], heading["name"], "adapter" if heading["other"] == "CA" else "router", row, at, lanes)


def _by_lid(listing: Listing, ports: list[_Port]) -> dict[int, str]:
    """The node of each LID, which names the other ends of cables; without a subnet manager all LIDs are 0."""
    owners: dict[int, set[str]] = {}
    for port in ports:
        owners.setdefault(int(port.row["lid"]), set()).add(port.guid)
    for port in ports:
        if _is_up(port) and not port.row["peer"] and len(owners.get(int(port.row["peer_lid"]), ())) > 1:
            raise HpctrainError(
                "HT-fabric-lid-twice",
                "{where}: several nodes have the LID {lid}, which is all that names the other end of this cable",
                f"iblinkinfo --line names it by its GUID: iblinkinfo --line > {listing.where}",
                where=port.where,
                lid=int(port.row["peer_lid"]),
            )
    return {lid: min(guids) for lid, guids in owners.items()}


def _is_up(port: _Port) -> bool:
    return port.row["peer_lid"] is not None


def _peer(port: _Port, by_lid: dict[int, str]) -> str | None:
    if not _is_up(port):
        return None
    lid = int(port.row["peer_lid"])
    guid: str = port.row["peer"] or by_lid.get(lid, f"{lid:016x}")
    return guid


def _nodes(ports: list[_Port]) -> dict[str, FabricNode]:
    most: dict[str, int] = {}
    several: set[str] = set()
    for port in ports:
        number = int(port.row["port"])
        if most.setdefault(port.guid, number) != number:
            several.add(port.guid)
        most[port.guid] = max(most[port.guid], number)
    nodes: dict[str, FabricNode] = {}
    for port in ports:
        if port.guid not in nodes:
            many = port.guid in several or most[port.guid] > _MOST_PORTS or is_switch_name(port.name)
            kind: Kind = "switch" if port.kind == "switch" or (not port.kind and many) else "adapter"
            nodes[port.guid] = FabricNode(
                kind=kind,
                guid=port.guid,
                name=port.name,
                ports=most[port.guid],
                lid=int(port.row["lid"]) if kind == "switch" else None,
                where=port.where,
            )
    return nodes


def _adapters_by_lid(ports: list[_Port], by_lid: dict[int, str], nodes: dict[str, FabricNode]) -> Iterator[Record]:
    """The adapters in an output of ``--switches-only``: the ends of cables that are not switches."""
    found: dict[str, Record] = {}
    for port in ports:
        guid = _peer(port, by_lid)
        if guid is None or guid in nodes or guid in found:
            continue
        row = port.row
        found[guid] = FabricNode(
            kind="adapter", guid=guid, name=row["peer_name"], ports=int(row["peer_port"]), where=port.where
        )
        yield found[guid]
        yield Link(
            guid=guid,
            port=int(row["peer_port"]),
            peer=port.guid,
            peer_port=int(row["port"]),
            lid=int(row["peer_lid"]),
            width=port.lanes[0],
            speed=port.lanes[1],
            where=port.where,
        )
    if found:
        yield Remark(
            text=f"lists switches only: {len(found)} adapters are known from the cables to them", where=ports[0].where
        )
