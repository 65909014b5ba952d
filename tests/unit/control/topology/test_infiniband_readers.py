"""Readers of InfiniBand tools: what they make of a small text, and of a damaged one."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from hpctrain.common.errors import HpctrainError
from hpctrain.control.topology.build import build_fabric
from hpctrain.control.topology.readers import forwarding, ibnetdiscover
from hpctrain.control.topology.records import FabricNode, Forward, Link, Record, Remark
from hpctrain.control.topology.summary import counts
from support.refusals import refused
from support.topology.infiniband_texts import (
    AGGREGATION,
    DUMP_LFTS,
    IBNETDISCOVER,
    IBNETDISCOVER_PORTS,
)

Reader = Callable[[str, str], Iterator[Record]]
_FABRICS: dict[str, tuple[Reader, str]] = {
    "ibnetdiscover": (ibnetdiscover.read, IBNETDISCOVER),
    "ibnetdiscover -p": (ibnetdiscover.read_ports, IBNETDISCOVER_PORTS),
}
_READERS = {**_FABRICS, "dump_lfts": (forwarding.read, DUMP_LFTS)}


def _of(kind: type[Any], records: list[Record]) -> list[Any]:
    return [record for record in records if isinstance(record, kind)]


@pytest.mark.parametrize("tool", _FABRICS)
def test_every_tool_tells_the_same(tool: str) -> None:
    read, text = _FABRICS[tool]
    fabric = build_fabric(read(text, "f"))
    assert fabric.names == ("leaf1", "leaf2", "spine", "n1 mlx5_0", "n2 mlx5_0")
    assert fabric.hosts == ("n1", "n2")
    assert fabric.level.tolist() == [1, 1, 2, 0, 0]
    assert fabric.lid.tolist() == [1, 2, 3, 4, 5]
    cables = sorted(
        zip(
            fabric.source.tolist(),
            fabric.source_port.tolist(),
            fabric.target.tolist(),
            fabric.bandwidth.tolist(),
            strict=True,
        )
    )
    assert cables == [
        *((0, 1, 3, 50e9), (0, 3, 2, 50e9), (1, 1, 4, 25e9), (1, 3, 2, 50e9)),
        *((2, 1, 0, 50e9), (2, 2, 1, 50e9), (3, 1, 0, 50e9), (4, 1, 1, 25e9)),
    ]


def test_ibnetdiscover_gives_devices_and_places() -> None:
    records = list(ibnetdiscover.read(IBNETDISCOVER, "f"))
    node = _of(FabricNode, records)[3]
    assert node == FabricNode(kind="adapter", guid="00000000000000a0", name="n1 mlx5_0", device_id=0x1021, where="f:35")
    assert _of(Link, records)[-2].lid == 4
    (remark,) = _of(Remark, records)
    assert remark.where == "f:1"
    assert "1" in remark.text and "src/query_smp.c:195" in remark.text


@pytest.mark.parametrize(
    ("old", "new", "code", "line"),
    [
        ('"S-0000000000000003"[1]\t', '"S-000000000000003"[1]\t', "HT-fabric-file-damaged", 13),
        ("4xHDR", "4xHD", "HT-fabric-file-damaged", 20),
        ('Switch\t4 "S-0000000000000001"', 'Switch\tfour "S-0000000000000001"', "HT-fabric-file-damaged", 11),
        ("Switch\t4", "#", "HT-fabric-file-damaged", 12),
        ("[1]\t", "x" * 5000, "HT-fabric-file-damaged", 12),
    ],
)
def test_a_damaged_line_of_ibnetdiscover_is_named(old: str, new: str, code: str, line: int) -> None:
    with refused(code, where=f"f:{line}") as caught:
        list(ibnetdiscover.read(IBNETDISCOVER.replace(old, new, 1), "f"))
    assert caught.value.hint.endswith(" > f")


def test_unknown_width_and_speed_are_no_error() -> None:
    links = _of(Link, list(ibnetdiscover.read(IBNETDISCOVER.replace("4xHDR", "?????"), "f")))
    assert [link.speed for link in links] == ["NDR", "NDR", None, "NDR", "NDR", "NDR", "NDR", None]
    text = IBNETDISCOVER_PORTS.replace("4x HDR", "?? ???")
    assert sum(link.width is None for link in _of(Link, list(ibnetdiscover.read_ports(text, "f")))) == 2


def test_routers_and_their_cables_are_passed_over() -> None:
    router = '\nvendid=0x2c9\nrtguid=0x9\nRt\t2 "R-0000000000000009"\t\t# "router"\n'
    router += '[1](9) \t"S-0000000000000001"[4]\t\t# lid 9 lmc 0 "leaf1" lid 1 4xNDR\n'
    cable = '[4]\t"R-0000000000000009"[1](9) \t\t# "router" lid 9 4xNDR\n'
    text = IBNETDISCOVER.replace("[3]\t", f"{cable}[3]\t", 1) + router
    assert (
        build_fabric(ibnetdiscover.read(text, "f")).names == build_fabric(ibnetdiscover.read(IBNETDISCOVER, "f")).names
    )
    with refused("HT-fabric-unknown-format"):
        list(ibnetdiscover.read(router, "f"))


@pytest.mark.parametrize("tool", _FABRICS)
def test_aggregation_nodes_are_not_counted_whether_they_are_listed_or_not(tool: str) -> None:
    read, text = _FABRICS[tool]
    before, cable, engine = AGGREGATION[tool]
    with_cable = text.replace(before, cable + before, 1)
    assert with_cable != text
    for listed in (with_cable, with_cable + engine):
        assert counts(build_fabric(read(listed, "f"))) == counts(build_fabric(read(text, "f")))


def test_a_generated_listing_without_lids() -> None:
    text = re.sub(" (?:enhanced|base) port 0 lid [0-9]+ lmc 0", "", IBNETDISCOVER)
    found, plain = (build_fabric(ibnetdiscover.read(each, "f")) for each in (text, IBNETDISCOVER))
    assert text != IBNETDISCOVER and found.lid.tolist() == [0, 0, 0, 4, 5]
    assert (found.names, found.source.tolist(), found.warnings) == (plain.names, plain.source.tolist(), plain.warnings)
    without = re.sub(r"lid [0-9]+ (?=4x)", "", re.sub("lid [0-9]+ lmc 0 ", "", text))
    assert build_fabric(ibnetdiscover.read(without, "f")).source.tolist() == plain.source.tolist()


def test_forwarding_tables() -> None:
    records = list(forwarding.read(DUMP_LFTS, "f"))
    entries = _of(Forward, records)
    assert len(entries) == 8
    assert entries[3] == Forward(switch="0000000000000001", switch_lid=None, lid=5, port=3, where="f:7")
    assert entries[4] == Forward(switch="0000000000000002", switch_lid=2, lid=4, port=3, where="f:12")
    (remark,) = _of(Remark, records)
    assert "iberror: failed" in remark.text
    dropped = DUMP_LFTS.replace("0x0002 003", "0x0002 255")
    assert [entry.lid for entry in _of(Forward, list(forwarding.read(dropped, "f")))[:3]] == [1, 4, 5]
    # As ibroute -n prints it.
    brief = re.sub(r"(?m) : \(.*\)$", " ", DUMP_LFTS)
    assert _of(Forward, list(forwarding.read(brief, "f"))) == entries


@pytest.mark.parametrize(
    ("text", "code", "values"),
    [
        (
            DUMP_LFTS[: DUMP_LFTS.index("4 valid")],
            "HT-fabric-file-damaged",
            {"where": "f:7"},
        ),
        (DUMP_LFTS.replace("4 valid", "5 valid"), "HT-fabric-file-damaged", {"where": "f:8"}),
        (DUMP_LFTS.replace("0x0002 003 :", "0x0002 3"), "HT-fabric-file-damaged", {"where": "f:5"}),
        (DUMP_LFTS[DUMP_LFTS.index("0x0001") :], "HT-fabric-file-damaged", {"where": "f:1"}),
        (
            "Unicast lids [0x0-0x5] of switch Lid 2 guid 0x0000000000000002 (x):\n0 valid lids dumped\n",
            "HT-fabric-unknown-format",
            {"where": "f"},
        ),
    ],
)
def test_damaged_forwarding_tables_are_an_error(text: str, code: str, values: dict[str, object]) -> None:
    with refused(code, **values):
        list(forwarding.read(text, "f"))


@pytest.mark.parametrize("tool", _READERS)
@pytest.mark.parametrize(
    ("text", "code", "where"),
    [
        ("", "HT-fabric-unknown-format", "f"),
        (" \n", "HT-fabric-unknown-format", "f"),
        ("\x7fELF\0\0", "HT-fabric-unknown-format", "f"),
        ("once upon a time\n", None, "f"),
        ("x" * 10**7, "HT-fabric-file-damaged", "f:1"),
    ],
)
def test_what_no_tool_prints_is_an_error(tool: str, text: str, code: str | None, where: str) -> None:
    read, _ = _READERS[tool]
    with refused(code or "HT-fabric-unknown-format", where=where):
        list(read(text, "f"))


@pytest.mark.parametrize("tool", _READERS)
def test_every_cut_is_an_error_or_loses_no_cable(tool: str) -> None:
    read, text = _READERS[tool]
    whole = {(link.guid, link.port) for link in _of(Link, list(read(text, "f")))}
    for length in range(len(text) - 1):
        try:
            records = list(read(text[:length], "f"))
            if tool in _FABRICS:
                build_fabric(records)
        except HpctrainError:
            continue
        cables = {end for link in _of(Link, records) for end in ((link.guid, link.port), (link.peer, link.peer_port))}
        missing = whole - cables
        assert missing <= {("0000000000000001", 2)}, (text[:length][-80:], missing)


def test_cable_ends_of_different_speed_are_remarked_upon() -> None:
    def remarks(text: str) -> list[str]:
        warnings = build_fabric(ibnetdiscover.read(text, "f")).warnings
        return [each for each in warnings if "different speeds" in each]

    assert remarks(IBNETDISCOVER) == []
    told = IBNETDISCOVER.replace('lid 5 lmc 0 "MF0;leaf2:MQM9701/U1" lid 2 4xHDR', 'lid 5 lmc 0 "leaf2" lid 2 1xNDR')
    assert told != IBNETDISCOVER
    [warning] = remarks(told)
    assert "(1): MF0;leaf2:MQM9701/U1" in warning


def test_xdr_that_an_old_ibnetdiscover_prints_as_qdr_is_of_unknown_speed() -> None:
    listed = re.sub("4x[NH]DR", "4xQDR", IBNETDISCOVER)
    for device, known in (("0x1021", True), ("0x1023", False)):
        fabric = build_fabric(ibnetdiscover.read(re.sub("devid=0x10[0-9a-f]+", f"devid={device}", listed), "f"))
        assert (set(fabric.bandwidth.tolist()) == {4e9}) == known
        assert any("before XDR" in warning for warning in fabric.warnings) != known
