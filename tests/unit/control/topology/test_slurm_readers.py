"""Slurm's texts: topology.conf and scontrol show topology."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from hpctrain.control.topology.readers import slurm
from hpctrain.control.topology.records import Record, Remark, SwitchGroup
from support.refusals import refused

Shape = dict[str, tuple[tuple[str, ...], tuple[str, ...]]]

TREE: Shape = {"core": (("s1", "s2"), ()), "s1": ((), ("n1", "n2")), "s2": ((), ("n3", "n4"))}
BLOCKS: Shape = {"b1": ((), ("n1", "n2")), "b2": ((), ("n3", "n4"))}

CONF = """\
# Our fabric
SwitchName=core Switches=s[1-2]   # the top
switchname=s1 nodes=n[1-2] LINKSPEED=100

SwitchName = "s2" \\
    Nodes=n3,n4
"""
SCONTROL = """\
SwitchName=core Level=1 LinkSpeed=1 Nodes=n[1-4] Switches=s[1-2]
SwitchName=s1 Level=0 LinkSpeed=1 Nodes=n[1-2]
SwitchName=s2 Level=0 LinkSpeed=1 Nodes=n[3-4]
"""


def shape(records: Iterator[Record]) -> Shape:
    return {record.name: (record.switches, record.hosts) for record in records if isinstance(record, SwitchGroup)}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (CONF, TREE),
        (SCONTROL, TREE),
        (CONF.replace("\n", "\r\n"), TREE),
        ("BlockName=b1 Nodes=n[1-2]\nBlockName=b2 Nodes=n[3-4]\nBlockSizes=1,2\nAggregatedBlock=b[1-2]\n", BLOCKS),
        (
            "BlockName=b1 BlockIndex=0 Nodes=n1,n2 BlockSize=2\nBlockName=b2 BlockIndex=1 Nodes=n3,n4\n",
            BLOCKS,
        ),
    ],
)
def test_read(text: str, expected: Shape) -> None:
    assert shape(slurm.read(text, "f")) == expected


def test_a_switch_without_hosts_is_remarked_upon() -> None:
    records = list(slurm.read("SwitchName=core Switches=s[1-2]\nSwitchName=s1 Nodes=n1\nSwitchName=s2\n", "f"))
    (remark,) = (record for record in records if isinstance(record, Remark))
    assert remark.where == "f:3" and "'s2'" in remark.text


NOT_VALID, CUT_OFF = "HT-slurm-topology-not-valid", "HT-slurm-topology-cut-off"
UNKNOWN = "{!r} contains {!r}, which is not defined"
TWO = "SwitchName=a Switches=b{}\nSwitchName=b {}\n"
REFUSED = [
    ("SwitchName=a Nodes=n[1-2\n", "HT-hosts-not-a-list", "f:1: Nodes", None),
    ("SwitchName=a Level=1 LinkSpeed=1 Nodes=n1\n", CUT_OFF, "f:1", None),
    ("SwitchName=a \\", CUT_OFF, "f:1", None),
    ("", NOT_VALID, "f", None),
    ("# nothing\n", NOT_VALID, "f", None),
    ("SwitchName=a Nodes=n1\nhello\n", NOT_VALID, "f:2", "not a line of a Slurm topology: 'hello'"),
    ("SwitchName=a Nodse=n1\n", NOT_VALID, "f:1", "SwitchName has no 'Nodse'"),
    ("SwitchName=a Nodes=n1 Nodes=n2\n", NOT_VALID, "f:1", "Nodes appears twice"),
    ("SwitchName=a Nodes=n1\n" * 2, NOT_VALID, "f:2", "'a' is defined a second time, after f:1"),
    (TWO.format(",c", "Nodes=n1"), NOT_VALID, "f:1", UNKNOWN.format("a", "c")),
    (TWO.format("", "Switches=a"), NOT_VALID, "f:1", "a circle in the tree: a - b - a"),
    (TWO.format(" Nodes=n1", "Nodes=n2"), NOT_VALID, "f:1", "'a' has both switches and hosts"),
    ("SwitchName= Nodes=n1\n", NOT_VALID, "f:1", None),
    ("BlockName= Nodes=n1\n", NOT_VALID, "f:1", None),
]


@pytest.mark.parametrize(("text", "code", "where", "problem"), REFUSED)
def test_refused_with_its_line(text: str, code: str, where: str | None, problem: str | None) -> None:
    values = {"where": where, "problem": problem}
    with refused(code, **{name: value for name, value in values.items() if value}):
        list(slurm.read(text, "f"))


def test_a_listing_of_scontrol_cut_within_a_name_is_an_error() -> None:
    text = SCONTROL.replace("n[3-4]", "node31,node32")
    for cut in (2, 3, 8):
        with refused("HT-slurm-topology-cut-off", where="f:3"):
            list(slurm.read(text[:-cut], "f"))
    # What people write by hand may lack its last line's end.
    assert list(slurm.read(CONF.rstrip("\n"), "f"))


@pytest.mark.parametrize("name", ["compute:inactive", "rack 7".replace(" ", "/"), "leaf@row(2)", "s*", "größe", "a=b"])
def test_any_name_of_a_switch_is_a_name(name: str) -> None:
    expected = {"top": ((name,), ()), name: ((), ("n1", "n2"))}
    conf = f"SwitchName={name} Nodes=n[1-2]\nSwitchName=top Switches={name}\n"
    assert shape(slurm.read(conf, "f")) == expected


def test_a_key_without_a_value() -> None:
    text = "BlockName=b1 BlockIndex=0 Nodes=n1 BlockSize=1\nBlockName=b2 BlockIndex=1 Nodes= BlockSize=1\n"
    assert shape(slurm.read(text, "f")) == {"b1": ((), ("n1",)), "b2": ((), ())}


BOTH = """\
SwitchName=root Switches=leaf[1-2]
SwitchName=leaf1 Nodes=g[1-2]
SwitchName=leaf2 Nodes=g[3-4]
BlockName=b1 Nodes=g[1-2]
BlockName=b2 Nodes=h[3-4]
BlockSizes=2
"""


def test_of_switches_and_blocks_in_one_text_the_switches_are_taken() -> None:
    assert set(shape(slurm.read(BOTH, "f"))) == {"root", "leaf1", "leaf2"}
