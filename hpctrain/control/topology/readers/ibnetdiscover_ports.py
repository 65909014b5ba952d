"""The output of ``ibnetdiscover -p`` (infiniband-diags): one port a line, with the port at its other end."""

from __future__ import annotations

import re
from collections.abc import Iterator

from hpctrain.control.topology.names import is_aggregation_node
from hpctrain.control.topology.readers.listing import Listing
from hpctrain.control.topology.records import FabricNode, Link, Record

_PORT = re.compile(
    r"(?P<kind>SW|CA|RT)\s+(?P<lid>[0-9]{1,5})\s+(?P<port>[0-9]{1,3})\s+0x(?P<guid>[0-9a-f]{16})\s+"
    r"(?P<width>[0-9]{1,2}x|\?\?)\s+(?P<speed>\?\?\?|[A-Z0-9]+)\s+"
    r"(?:-\s+(?P<peer_kind>SW|CA|RT)\s+(?P<peer_lid>[0-9]{1,5})\s+(?P<peer_port>[0-9]{1,3})\s+0x(?P<peer>[0-9a-f]{16})"
    r"\s+\( '(?P<name>.*)' - '(?P<peer_name>.*)' \)|(?:-\s+)?(?:\?\?\?\s*)?'(?P<lone>.*)')\s*"
)


def read(text: str, where: str) -> Iterator[Record]:
    """Cable ends in the order of the lines, then the nodes that they belong to.

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
            raise listing.fault("HT-fabric-file-damaged", "not a port as ibnetdiscover -p lists it", number, line)
        width, speed = listing.lanes(number, row["width"], row["speed"])
        if "RT" in (row["kind"], row["peer_kind"]):
            continue
        at = f"{where}:{number}"
        port = int(row["port"])
        name = row["name"] if row["peer"] else row["lone"]
        listed.add(row["guid"])
        nodes.setdefault(row["guid"], _node(row["kind"], row["guid"], name, int(row["lid"]), at))
        if row["peer"]:
            peer = _node(row["peer_kind"], row["peer"], row["peer_name"], int(row["peer_lid"]), at)
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
        raise listing.fault("HT-fabric-unknown-format", "no port in it: not the output of ibnetdiscover -p", 1)
    if missing := {guid for guid in nodes.keys() - listed if not is_aggregation_node(nodes[guid])}:
        raise listing.cut_off(len(missing), next(node.where for guid, node in nodes.items() if guid in missing))
    yield from nodes.values()
    yield from listing.remarks()


def _node(kind: str, guid: str, name: str, lid: int, where: str) -> FabricNode:
    is_switch = kind == "SW"
    return FabricNode(
        kind="switch" if is_switch else "adapter", guid=guid, name=name, lid=lid if is_switch else None, where=where
    )
