"""The records that readers yield, and the cables that they describe together; contradictions become warnings."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from hpctrain.common.errors import abbreviated, counted


@dataclass(frozen=True, slots=True, kw_only=True)
class FabricNode:
    """A switch or a channel adapter.

    Attributes:
        guid: the node GUID, 16 hexadecimal digits in lower case.
        name: the node's description of itself; may be empty.
        device_id: the PCI device, None where the format has none.
        lid: the LID of a switch's port 0; an adapter's LIDs are those of its ports (see :class:`Link`).
    """

    kind: Literal["switch", "adapter"]
    guid: str
    name: str
    where: str
    device_id: int | None = None
    lid: int | None = None


class Link(NamedTuple):
    """One end of a cable, as seen by its node. A cable between two nodes that were both read occurs twice.

    A tuple, because a large fabric has hundreds of thousands, and no other immutable object is built faster.

    Attributes:
        peer, peer_port: the other end; None where nothing answered.
        lid: the LID of this port if this end is an adapter.
        width: the number of lanes, None where the format does not say.
        speed: the speed of a lane: SDR, DDR, QDR, FDR10, FDR, EDR, HDR, NDR, XDR.
    """

    guid: str
    port: int
    where: str
    peer: str | None = None
    peer_port: int | None = None
    lid: int | None = None
    width: int | None = None
    speed: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Forward:
    """One entry of a switch's forwarding table: packets to ``lid`` leave through ``port``.

    Attributes:
        switch: the switch's GUID where the format gives it, else None.
    """

    switch: str | None
    switch_lid: int | None
    lid: int
    port: int
    where: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SwitchGroup:
    """A switch of a Slurm tree, or a block: names only, no ports.

    Attributes:
        switches: the names of the switches directly below it.
    """

    name: str
    where: str
    switches: tuple[str, ...] = ()
    hosts: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Remark:
    """An irregularity that a reader skipped and the user should know about."""

    text: str
    where: str


Record = FabricNode | Link | Forward | SwitchGroup | Remark

# Payload of a lane in Gbit/s: the signalling rate less its line code (8b/10b up to QDR, 64b/66b up to EDR, 64b/66b
# with forward error correction from HDR on). InfiniBand Trade Association, InfiniBand Architecture Specification,
# volume 2, and its roadmap.
LANE_GBIT = {
    "SDR": 2.0,
    "DDR": 4.0,
    "QDR": 8.0,
    "FDR10": 10.0,
    "FDR": 14.0625 * 64 / 66,
    "EDR": 25.0,
    "HDR": 50.0,
    "NDR": 100.0,
    "XDR": 200.0,
}


def bandwidth(width: int | None, speed: str | None) -> float:
    """Payload in bytes per second and direction; NaN if width or speed is unknown."""
    if width is None or speed is None:
        return float("nan")
    return width * LANE_GBIT[speed] * 1e9 / 8


# ConnectX-8 to 10 and BlueField-4, as providers/mlx5/mlx5.c of rdma-core lists them. None of them is as slow as QDR.
_XDR_DEVICES = frozenset((0x1023, 0x1025, 0x1027, 0x2101, 0xA2DF))


_OWN = "switch ports cabled to their own switch, left out"
_SILENT = "ports at whose other end nothing answers (no cable, or a dead one)"
_ONE_SIDED = "cables that only one of their ends reports"
_CONTRADICTED = "ports whose other end reports another cable, left out"
_UNKNOWN = "cables to nodes that are not in the file, left out"
_UNEVEN = "cables whose ends report different speeds, each used for its own direction"
_FAULTS = (_OWN, _SILENT, _ONE_SIDED, _CONTRADICTED, _UNKNOWN, _UNEVEN)


@dataclass(kw_only=True)
class Found:
    """All records by kind, nodes by GUID and cable ends by GUID and port; the first of duplicates counts."""

    nodes: dict[str, FabricNode] = field(default_factory=dict)
    ends: dict[tuple[str, int], Link] = field(default_factory=dict)
    groups: list[SwitchGroup] = field(default_factory=list)
    forwards: list[Forward] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    where: str = ""


def sort_records(records: Iterable[Record]) -> Found:
    """The records by kind, remarks as warnings; ``where`` is the file of the first one."""
    found = Found()
    remarks: dict[str, list[str]] = {}
    for record in records:
        match record:
            case Link():
                found.ends.setdefault((record.guid, record.port), record)
            case Forward():
                found.forwards.append(record)
            case FabricNode():
                found.nodes.setdefault(record.guid, record)
            case SwitchGroup():
                found.groups.append(record)
            case Remark():
                remarks.setdefault(record.text, []).append(record.where)
        if not found.where:
            found.where = record.where.rpartition(":")[0] or record.where
    found.warnings += [f"{abbreviated(places)}: {text}" for text, places in remarks.items()]
    if slow := _without_xdr(found):
        found.ends |= {port: found.ends[port]._replace(speed=None) for port in slow}
        what = "ports that an ibnetdiscover from before XDR (rdma-core 49) prints as QDR, of unknown speed"
        found.warnings.append(counted(what, [_port(found, found.ends[port]) for port in slow]))
    return found


def cable_ends(found: Found) -> tuple[list[Link], list[str]]:
    """Both ends of each cable between two nodes, and the faults of the others.

    An end that only its peer reports is added from the peer's report. Cables from a node to itself and ends whose peer
    reports another cable carry no traffic and are left out.
    """
    ends: list[Link] = []
    faults: dict[str, list[str]] = {fault: [] for fault in _FAULTS}
    for key, end in found.ends.items():
        fault = None
        if end.peer is None or end.peer_port is None:
            fault = _SILENT
        elif end.peer == end.guid:
            fault = _OWN
        elif end.peer not in found.nodes or end.guid not in found.nodes:
            fault = _UNKNOWN
        else:
            back = found.ends.get((end.peer, end.peer_port))
            if back is None or back.peer is None:
                fault = _ONE_SIDED
                back = end._replace(guid=end.peer, port=end.peer_port, peer=end.guid, peer_port=end.port, lid=None)
                ends += [end, back]
            elif (back.peer, back.peer_port) != key:
                fault = _CONTRADICTED
            else:
                ends.append(end)
                fault = _UNEVEN if key < (end.peer, end.peer_port) and _speeds_differ(end, back) else None
        if fault:
            faults[fault].append(_port(found, end))
    return ends, [counted(fault, ports) for fault, ports in faults.items() if ports]


def _without_xdr(found: Found) -> list[tuple[str, int]]:
    """The ports at QDR if an adapter of XDR seems to be one of them: the tool takes XDR for QDR, here and elsewhere."""
    slow = [port for port, end in found.ends.items() if end.speed == "QDR"]
    takes_xdr_for_qdr = any(guid in found.nodes and found.nodes[guid].device_id in _XDR_DEVICES for guid, _ in slow)
    return slow if takes_xdr_for_qdr else []


def _speeds_differ(one: Link, other: Link) -> bool:
    if (one.width, one.speed) == (other.width, other.speed):
        return False
    return None not in (one.width, one.speed, other.width, other.speed)


def _port(found: Found, end: Link) -> str:
    node = found.nodes.get(end.guid)
    return f"{node.name if node and node.name else end.guid} port {end.port}"
