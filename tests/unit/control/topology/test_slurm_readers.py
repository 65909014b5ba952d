"""Slurm's texts: topology.conf, scontrol show topology and topology.yaml."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.common.cluster.host_list import expand_names
from hpctrain.control.topology.fabric_files import read_records
from hpctrain.control.topology.readers import slurm, slurm_yaml
from hpctrain.control.topology.readers.slurm import Choice
from hpctrain.control.topology.records import Record, Remark, SwitchGroup
from support.refusals import refused

Reader = Callable[[str, str], Iterator[Record]]
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
YAML = """\
---
- topology: nothing
  flat: true
- topology: other
  block:
    block_sizes: [1]
    blocks: [{block: x, nodes: y}]
- topology: ours  # the one that counts
  cluster_default: true
  tree:
    switches:
      - switch: core
        children: s[1-2]
      - switch: s1
        nodes: n[1-2]
      - switch: s2
        nodes: n3,n4
"""
# Inside a terminal: the command above, and a prompt that waits below.
PASTED = [
    ("$ scontrol show topology\n", ""),
    ("[root@n1 ~]# scontrol show topology\n", "[root@n1 ~]# "),
    ("\x1b]0;root@n1: ~\x07user@n1:~/work$ scontrol show topology\n", "user@n1:~/work$ "),
    ("n1:~ # scontrol show topology\n", "n1:~ #"),
]
BLOCK_YAML = """\
- topology: ours
  block:
    block_sizes:
      - 2
    blocks:
      - block: b1
        nodes: n[1-2]
      - block: b2
        nodes: n[3-4]
"""


def shape(records: Iterator[Record]) -> Shape:
    return {record.name: (record.switches, record.hosts) for record in records if isinstance(record, SwitchGroup)}


@pytest.mark.parametrize(
    ("reader", "text", "expected"),
    [
        (slurm.read, CONF, TREE),
        (slurm.read, SCONTROL, TREE),
        (slurm.read, CONF.replace("\n", "\r\n"), TREE),
        (slurm.read, "BlockName=b1 Nodes=n[1-2]\nBlockName=b2 Nodes=n[3-4]\nBlockSizes=2\n", BLOCKS),
        (
            slurm.read,
            "BlockName=b1 BlockIndex=0 Nodes=n1,n2 BlockSize=2\nBlockName=b2 BlockIndex=1 Nodes=n3,n4\n",
            BLOCKS,
        ),
        (slurm_yaml.read, YAML, TREE),
        (slurm_yaml.read, BLOCK_YAML, BLOCKS),
    ],
)
def test_read(reader: Reader, text: str, expected: Shape) -> None:
    assert shape(reader(text, "f")) == expected


def test_places() -> None:
    records = [record for record in slurm.read(CONF, "f") if isinstance(record, SwitchGroup)]
    assert [record.where for record in records] == ["f:2", "f:3", "f:5"]
    records = [record for record in slurm_yaml.read(YAML, "f") if isinstance(record, SwitchGroup)]
    assert [record.where for record in records] == ["f:12", "f:14", "f:16"]


@pytest.mark.parametrize(
    "text",
    [
        "BlockName=b1 Nodes=a\nBlockName=b2 Nodes=b\nBlockName=b3 Nodes=c\nBlockSizes=1,2,4\n",
        "BlockSizes=1,2,4\nBlockName=b1 Nodes=a\nBlockName=b2 Nodes=b\nBlockName=b3 Nodes=c\n",
    ],
)
def test_larger_blocks_are_neighbours_together(text: str) -> None:
    read = shape(slurm.read(text, "f"))
    pairs = [name for name, (switches, _) in read.items() if switches in (("b1", "b2"), ("b3",))]
    assert len(pairs) == 2
    assert [switches for switches, _ in read.values() if switches == tuple(pairs)] == [tuple(pairs)]


def test_aggregated_blocks_that_scontrol_prints() -> None:
    text = "BlockName=b1 BlockIndex=0 Nodes=a BlockSize=1\nBlockName=b2 BlockIndex=1 Nodes=b BlockSize=1\n"
    text += "AggregatedBlock=b[1-2] BlockIndex=2 BlockSize=2 Nodes=a,b\n"
    assert shape(slurm.read(text, "f"))["b[1-2]"] == (("b1", "b2"), ())
    # Slurm lists the smallest blocks of every larger one (topology/block/block_record.c).
    text += "BlockName=b3 BlockIndex=3 BlockSize=1 Nodes=c\n"
    text += "AggregatedBlock=b[1-3] BlockIndex=4 BlockSize=4 Nodes=a,b,c\n"
    assert shape(slurm.read(text, "f"))["b[1-3]"] == (("b[1-2]", "b3"), ())


def test_a_switch_without_hosts_is_remarked_upon() -> None:
    records = list(slurm.read("SwitchName=core Switches=s[1-2]\nSwitchName=s1 Nodes=n1\nSwitchName=s2\n", "f"))
    (remark,) = (record for record in records if isinstance(record, Remark))
    assert remark.where == "f:3" and "'s2'" in remark.text


NOT_VALID, CUT_OFF = "HT-slurm-topology-not-valid", "HT-slurm-topology-cut-off"
UNKNOWN = "{!r} contains {!r}, which is not defined"
TWO = "SwitchName=a Switches=b{}\nSwitchName=b {}\n"
REFUSED = [
    (slurm.read, "SwitchName=a Nodes=n[1-2\n", "HT-hosts-not-a-list", "f:1: Nodes", None),
    (slurm.read, "SwitchName=a Level=1 LinkSpeed=1 Nodes=n1\n", CUT_OFF, "f:1", None),
    (slurm.read, "SwitchName=a \\", CUT_OFF, "f", None),
    (slurm.read, "", NOT_VALID, "f", None),
    (slurm.read, "# nothing\n", NOT_VALID, "f", None),
    (slurm.read, "SwitchName=a Nodes=n1\nhello\n", NOT_VALID, "f:2", "not a line of a Slurm topology: 'hello'"),
    (slurm.read, "SwitchName=a Nodse=n1\n", NOT_VALID, "f:1", "SwitchName has no 'Nodse'"),
    (slurm.read, "SwitchName=a Nodes=n1 Nodes=n2\n", NOT_VALID, "f:1", "Nodes appears twice"),
    (slurm.read, "SwitchName=a Nodes=n1\n" * 2, NOT_VALID, "f:2", "'a' is defined a second time, after f:1"),
    (slurm.read, TWO.format(",c", "Nodes=n1"), NOT_VALID, "f:1", UNKNOWN.format("a", "c")),
    (slurm.read, TWO.format("", "Switches=a"), NOT_VALID, "f:1", "a circle in the tree: a - b - a"),
    (slurm.read, TWO.format(" Nodes=n1", "Nodes=n2"), NOT_VALID, "f:1", "'a' has both switches and hosts"),
    (slurm.read, "SwitchName= Nodes=n1\n", NOT_VALID, "f:1", None),
    (slurm.read, "BlockName= Nodes=n1\n", NOT_VALID, "f:1", None),
    (slurm.read, "BlockName=a Nodes=n1\nBlockSizes=2,3\n", NOT_VALID, "f:2", None),
    (slurm.read, "BlockName=a Nodes=n1\nBlockSizes=0,2\n", NOT_VALID, "f:2", None),
    (slurm_yaml.read, YAML.replace("n3,n4", "n[3-4"), "HT-hosts-not-a-list", "f:17: nodes", None),
    (slurm_yaml.read, "", "HT-file-no-mapping", None, None),
    (slurm_yaml.read, "a: [", "HT-file-not-yaml", "f:1", None),
    (slurm_yaml.read, "- &a [*a]\n", "HT-file-not-yaml", "f:1", None),
    (slurm_yaml.read, "[" * 5000, "HT-file-not-yaml", "f:1", None),
    (slurm_yaml.read, "- topology: a\n  tree:\n    switches: n1\n", "HT-file-value", "f:3", None),
    (slurm_yaml.read, "- topology: a\n  tree: {}\n", "HT-file-missing-key", None, None),
    (slurm_yaml.read, "- topology: a\n  topology: b\n  tree: {}\n", "HT-file-key-twice", "f:2", None),
    (slurm_yaml.read, YAML.replace("blocks: [{block: x, nodes: y}]", "blocks: y"), "HT-file-value", "f:7", None),
    (slurm_yaml.read, YAML.replace("[1]", "[one]"), "HT-file-value", "f:6", None),
    (slurm_yaml.read, YAML.replace("  tree:", "  tre:"), "HT-file-unknown-key", None, None),
    (slurm_yaml.read, YAML.replace("children: s[1-2]", "childs: s[1-2]"), "HT-file-unknown-key", "f:13", None),
    (slurm_yaml.read, BLOCK_YAML.replace("block_sizes", "block_sizes\ufffd"), "HT-file-unknown-key", None, None),
    (slurm_yaml.read, YAML.replace("- switch: s2", "- switch: s3"), NOT_VALID, "f:12", UNKNOWN.format("core", "s2")),
    (slurm_yaml.read, YAML.replace("children: s[1-2]", "children: s1\n        nodes: n5"), NOT_VALID, "f:12", None),
]


@pytest.mark.parametrize(("reader", "text", "code", "where", "problem"), REFUSED)
def test_refused_with_its_line(reader: Reader, text: str, code: str, where: str | None, problem: str | None) -> None:
    values = {"where": where, "problem": problem}
    with refused(code, **{name: value for name, value in values.items() if value}):
        list(reader(text, "f"))


@pytest.mark.parametrize(("above", "below"), PASTED)
def test_a_prompt_above_and_below_a_listing_is_passed_over(above: str, below: str) -> None:
    assert [(g.name, g.hosts) for g in slurm.read(above + SCONTROL + below, "f")] == [
        (g.name, g.hosts) for g in slurm.read(SCONTROL, "f")
    ]


def test_a_listing_of_scontrol_cut_within_a_name_is_an_error() -> None:
    text = SCONTROL.replace("n[3-4]", "node31,node32")
    for cut in (2, 3, 8):
        with refused("HT-slurm-topology-cut-off", where="f:3"):
            list(slurm.read(text[:-cut], "f"))
    # What people write by hand may lack its last line's end.
    assert list(slurm.read(CONF.rstrip("\n"), "f"))


@pytest.mark.parametrize("kind", ["ring", "torus3d"])
def test_another_kind_beside_a_tree_is_passed_over(kind: str) -> None:
    text = YAML + f"- topology: other kind\n  {kind}: {{}}\n"
    assert shape(slurm_yaml.read(text, "f")) == TREE


@pytest.mark.parametrize(
    "text",
    [
        "- topology: a\n  ring:\n    rings:\n      - {ring: r0, nodes: n1}\n",
        "- topology: a\n  torus3d: {}\n- topology: b\n  flat: true\n",
    ],
)
def test_kinds_without_switches_are_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "topology").write_text(text)
    with refused("HT-topology-no-groups", where=tmp_path / "topology") as caught:
        list(read_records([tmp_path / "topology"]))
    assert "ibnetdiscover" in caught.value.hint


@pytest.mark.parametrize("name", ["compute:inactive", "rack 7".replace(" ", "/"), "leaf@row(2)", "s*", "größe", "a=b"])
def test_any_name_of_a_switch_is_a_name(name: str) -> None:
    expected = {"top": ((name,), ()), name: ((), ("n1", "n2"))}
    conf = f"SwitchName={name} Nodes=n[1-2]\nSwitchName=top Switches={name}\n"
    assert shape(slurm.read(conf, "f")) == expected
    yaml = "- topology: a\n  tree:\n    switches:\n"
    yaml += f"      - {{switch: '{name}', nodes: 'n[1-2]'}}\n      - {{switch: top, children: '{name}'}}\n"
    assert shape(slurm_yaml.read(yaml, "f")) == expected


@given(st.lists(st.from_regex(r"[^\s,\[\]#\"\\]{1,12}", fullmatch=True), min_size=1, max_size=4, unique=True))
def test_lists_of_any_names(names: list[str]) -> None:
    assert expand_names(",".join(names), "f") == tuple(names)


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


@pytest.mark.parametrize(
    ("choice", "names"),
    [
        (Choice(), {"root", "leaf1", "leaf2"}),
        (Choice(hosts=("g1", "g3")), {"root", "leaf1", "leaf2"}),
        (Choice(hosts=("g1", "h3")), {"b1", "b2"}),
        (Choice(hosts=("g1", "g2")), {"root", "leaf1", "leaf2"}),
        (Choice(name="block"), {"b1", "b2"}),
        (Choice(name="tree", hosts=("h3",)), {"root", "leaf1", "leaf2"}),
    ],
)
def test_switches_and_blocks_in_one_file(choice: Choice, names: set[str]) -> None:
    assert set(shape(slurm.read(BOTH, "f", choice))) == names


def test_it_is_said_that_one_of_two_kinds_is_taken() -> None:
    (remark,) = (record for record in slurm.read(BOTH, "f") if isinstance(record, Remark))
    assert "block) tree " in remark.text
    assert not [r for r in slurm.read(BOTH, "f", Choice(hosts=("h3",))) if isinstance(r, Remark)]
    with refused("HT-choice-unknown", name="blok"):
        slurm.read(BOTH, "f", Choice(name="blok"))
    with refused("HT-choice-unknown", where="f", name="block"):
        slurm.read(CONF, "f", Choice(name="block"))


SEVERAL = """\
- topology: cpu
  cluster_default: true
  tree: {switches: [{switch: eth, nodes: "cpu[1-4]"}]}
- topology: gpu
  block: {block_sizes: [2, 4], blocks: [{block: b1, nodes: "gpu[1-2]"}, {block: b2, nodes: "gpu[3-4]"}]}
- topology: gpu-ib
  tree: {switches: [{switch: ib, nodes: "gpu[3-8]"}]}
- topology: flat
  flat: true
"""


@pytest.mark.parametrize(
    ("choice", "leaf"),
    [
        (Choice(), "eth"),
        (Choice(hosts=("cpu2", "cpu1")), "eth"),
        (Choice(hosts=("gpu1", "gpu4")), "b1"),
        (Choice(hosts=("gpu4", "gpu5")), "ib"),
        (Choice(name="gpu-ib", hosts=("gpu3",)), "ib"),
        (Choice(name="gpu"), "b1"),
        # None has all of them: that with the most, so that the others are named.
        (Choice(hosts=("gpu1", "gpu2", "login")), "b1"),
    ],
)
def test_of_several_topologies_the_one_that_has_the_hosts(choice: Choice, leaf: str) -> None:
    assert leaf in shape(slurm_yaml.read(SEVERAL, "f", choice))


def test_hosts_of_no_topology_are_not_said_to_be_of_several() -> None:
    """That the fabric lacks them is said where it is used."""
    text = SEVERAL.replace("cluster_default: true", "cluster_default: false")
    assert text != SEVERAL
    (remark,) = [each for each in slurm_yaml.read(text, "f", Choice(hosts=("x1",))) if isinstance(each, Remark)]
    assert "first" in remark.text


@pytest.mark.parametrize(
    ("choice", "code", "values"),
    [
        (Choice(hosts=("gpu3", "gpu4")), "HT-topology-ambiguous", {"names": "gpu, gpu-ib"}),
        (Choice(name="flat"), "HT-topology-no-groups", {}),
        (Choice(name="gup"), "HT-choice-unknown", {"name": "gup"}),
    ],
)
def test_no_topology_to_take(choice: Choice, code: str, values: dict[str, str]) -> None:
    with refused(code, **values):
        list(slurm_yaml.read(SEVERAL, "f", choice))
