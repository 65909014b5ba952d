"""The output of ``ibnetdiscover`` (infiniband-diags): every node with its cables, or with ``-p`` a port a line."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence, Set
from typing import Literal

from hpctrain.control.topology.names import is_aggregation_name, is_aggregation_node
from hpctrain.control.topology.readers.listing import Listing
from hpctrain.control.topology.records import FabricNode, Link, Record

_ATTRIBUTES = ("vendid=", "devid=", "sysimgguid=", "switchguid=", "caguid=", "rtguid=")
_DEVICE = re.compile(r"devid=0x([0-9a-f]{1,8})\s*")
_NODE = re.compile(
    r'(?P<kind>Switch|Ca|Rt)\s*(?P<ports>[0-9]{1,3})\s*"[SHR]-(?P<guid>[0-9a-f]{16})"\s*#\s*"(?P<name>.*)"'
    # Generators of listings leave the LID out.
    r"(?: (?:enhanced|base) port 0 lid (?P<lid>[0-9]{1,5}) lmc [0-7])?\s*"
)
_CABLE = re.compile(
    r"\[([0-9]{1,3})\](?:\[ext [0-9]+\])?(?:\([0-9a-f]{1,16}\))?\s*"  # this end
    r'"([SHR])-([0-9a-f]{16})"\[([0-9]{1,3})\](?:\[ext [0-9]+\])?(?: ?\([0-9a-f]{1,16}\))?\s*'  # the other
    r'#\s*(?:lid ([0-9]{1,5}) lmc [0-7]\s+)?"(.*)"\s*(?:lid [0-9]{1,5}\s*)?'
    r"([0-9]{1,2}x|\?\?)(\?\?\?|[A-Z0-9]+)(?:\s.*)?"
)
_PORT = re.compile(
    r"(?P<kind>SW|CA|RT)\s+(?P<lid>[0-9]{1,5})\s+(?P<port>[0-9]{1,3})\s+0x(?P<guid>[0-9a-f]{16})\s+"
    r"(?P<width>[0-9]{1,2}x|\?\?)\s+(?P<speed>\?\?\?|[A-Z0-9]+)\s+"
    r"(?:-\s+(?P<peer_kind>SW|CA|RT)\s+(?P<peer_lid>[0-9]{1,5})\s+(?P<peer_port>[0-9]{1,3})\s+0x(?P<peer>[0-9a-f]{16})"
    r"\s+\( '(?P<name>.*)' - '(?P<peer_name>.*)' \)|(?:-\s+)?(?:\?\?\?\s*)?'(?P<lone>.*)')\s*"
)
Kind = Literal["switch", "adapter"]
_KINDS: dict[str, Kind] = {"Switch": "switch", "Ca": "adapter"}


def read(text: str, where: str) -> Iterator[Record]:
    """Nodes and cable ends of a full listing, in its order.

    Lines before the header and between the nodes (``umad`` errors, chassis headings) are skipped with one remark.
    Routers and the cables to them are skipped as well.

    Raises:
        HpctrainError: the text is not such a listing, a node or cable in it is damaged, or it is cut off: a cable
            leads to a node that is not listed.
    """
    listing = Listing(text, where, "ibnetdiscover")
    guid, kind = "", None
    # The attributes of the next node, which come before the line that names it.
    attributes: list[str] = []
    listed: set[str] = set()
    # The nodes at the end of cables, with the line of the first of these.
    mentioned: dict[str, int] = {}
    has_nodes = False
    for number, line in listing:
        if line.startswith("[") and line[1:2].isdigit():
            link = _link(listing, number, line, guid, mentioned)
            if link and kind:
                yield link
        elif line.startswith(("Switch", "Ca", "Rt")):
            node = _NODE.fullmatch(line)
            if node is None or (node["kind"] != "Switch" and node["lid"]):
                raise listing.damaged("not a node as ibnetdiscover lists it", number, line)
            guid, kind = node["guid"], _KINDS.get(node["kind"])
            listed.add(guid)
            if kind:
                has_nodes = True
                yield _node(node, kind, attributes, f"{where}:{number}")
            attributes = []
        elif line.startswith(_ATTRIBUTES):
            attributes.append(line)
        elif line and not line.startswith("#"):
            listing.pass_over(number, line)
    if attributes:
        raise listing.damaged("the file is cut off in the middle of a node", listing.last)
    _require_whole(listing, mentioned, listed, has_nodes=has_nodes)
    yield from listing.remarks()


def _require_whole(listing: Listing, mentioned: Mapping[str, int], listed: Set[str], *, has_nodes: bool) -> None:
    if not has_nodes:
        raise listing.foreign("switch and no adapter")
    if missing := mentioned.keys() - listed:
        raise listing.cut_off(len(missing), f"{listing.where}:{min(mentioned[guid] for guid in missing)}")


def _node(node: re.Match[str], kind: Kind, attributes: Sequence[str], where: str) -> FabricNode:
    devices = [int(match[1], 16) for line in attributes if (match := _DEVICE.fullmatch(line))]
    return FabricNode(
        kind=kind,
        guid=node["guid"],
        name=node["name"],
        device_id=devices[-1] if devices else None,
        lid=int(node["lid"]) if node["lid"] else None,
        where=where,
    )


def _link(listing: Listing, number: int, line: str, guid: str, mentioned: dict[str, int]) -> Link | None:
    """A node's end of a cable, as most lines of a listing are; None for one to a router."""
    cable = _CABLE.fullmatch(line)
    if cable is None or not guid:
        what = "not a cable as ibnetdiscover lists it" if guid else "a cable before any node"
        raise listing.damaged(what, number, line)
    port, peer_kind, peer, peer_port, lid, peer_name, lanes, rate = cable.groups()
    width, speed = listing.lanes(number, lanes, rate)
    if peer_kind == "R":
        return None
    # The section of a SHARP node, which takes no part, may be missing.
    if not is_aggregation_name(peer_name):
        mentioned.setdefault(peer, number)
    at = f"{listing.where}:{number}"
    return Link(guid, int(port), at, peer, int(peer_port), int(lid) if lid else None, width, speed)


def read_ports(text: str, where: str) -> Iterator[Record]:
    """Cable ends of ``ibnetdiscover -p``, which has a port a line, and then the nodes that they belong to.

    GUIDs are those of ports here, so each port of an adapter becomes a separate adapter. Progress lines of the
    discovery (``DR path …``) are skipped with one remark.

    Raises:
        HpctrainError: the text is not such a listing, or a line of it is damaged or cut off.
    """
    listing = Listing(text, where, "ibnetdiscover -p")
    nodes: dict[str, FabricNode] = {}
    listed: set[str] = set()
    for number, line in listing:
        if not line.startswith(("SW ", "CA ", "RT ")):
            listing.pass_over(number, line)
            continue
        row = _PORT.fullmatch(line)
        if row is None:
            raise listing.damaged("not a port as ibnetdiscover -p lists it", number, line)
        width, speed = listing.lanes(number, row["width"], row["speed"])
        if "RT" in (row["kind"], row["peer_kind"]):
            continue
        at = f"{where}:{number}"
        port = int(row["port"])
        name = row["name"] if row["peer"] else row["lone"]
        listed.add(row["guid"])
        nodes.setdefault(row["guid"], _port_node(row["kind"], row["guid"], name, int(row["lid"]), at))
        if row["peer"]:
            peer = _port_node(row["peer_kind"], row["peer"], row["peer_name"], int(row["peer_lid"]), at)
            nodes.setdefault(peer.guid, peer)
        yield Link(
            guid=row["guid"],
            port=port,
            peer=row["peer"],
            peer_port=int(row["peer_port"]) if row["peer"] else None,
            lid=int(row["lid"]) if row["kind"] == "CA" else None,
            width=width,
            speed=speed,
            where=at,
        )
    if not nodes:
        raise listing.foreign("port")
    if missing := {guid for guid in nodes.keys() - listed if not is_aggregation_node(nodes[guid])}:
        raise listing.cut_off(len(missing), next(node.where for guid, node in nodes.items() if guid in missing))
    yield from nodes.values()
    yield from listing.remarks()


def _port_node(kind: str, guid: str, name: str, lid: int, where: str) -> FabricNode:
    is_switch = kind == "SW"
    return FabricNode(
        kind="switch" if is_switch else "adapter", guid=guid, name=name, lid=lid if is_switch else None, where=where
    )
