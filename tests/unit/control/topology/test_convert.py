"""Fabrics as Slurm's files, and back.

After a change that is meant: ``REGENERATE=1 python -m pytest tests/unit/control/topology/test_convert.py``.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from hpctrain.common.cluster.host_list import expand_hosts
from hpctrain.control.topology.build import build_fabric
from hpctrain.control.topology.convert import topology_conf, topology_yaml
from hpctrain.control.topology.fabric import Fabric
from hpctrain.control.topology.fat_tree import fat_tree
from hpctrain.control.topology.readers import ibnetdiscover, slurm
from hpctrain.control.topology.records import SwitchGroup
from support.refusals import refused

GOLDEN = Path(__file__).parents[3] / "golden" / "slurm"
WRITERS = {
    "topology.conf": topology_conf,
    "topology.yaml": topology_yaml,
}
Tree = frozenset["Tree | str"]


def generated(hosts: int, leaf_down: int, pod_leaves: int | None, rails: int = 1) -> Fabric:
    text = fat_tree(
        hosts=hosts,
        rails=rails,
        leaf_down=leaf_down,
        leaf_up=2,
        levels=2 if pod_leaves is None else 3,
        pod_leaves=pod_leaves,
    )
    return build_fabric(ibnetdiscover.read(text, "generated"))


def tree(text: str) -> Tree:
    """The tree without the switches' names."""
    if text.startswith("-"):
        names = {"switch": "SwitchName", "children": "Switches", "nodes": "Nodes"}
        switches = yaml.safe_load(text)[0]["tree"]["switches"]
        text = "".join(" ".join(f"{names[key]}={switch[key]}" for key in switch) + "\n" for switch in switches)
    groups = {record.name: record for record in slurm.read(text, "converted") if isinstance(record, SwitchGroup)}

    def below(group: SwitchGroup) -> Tree:
        return frozenset([*group.hosts, *(below(groups[name]) for name in group.switches)])

    children = {name for group in groups.values() for name in group.switches}
    return frozenset(below(group) for group in groups.values() if group.name not in children)


def cut(items: list[Tree] | list[str], size: int) -> list[Tree]:
    return [frozenset(items[start : start + size]) for start in range(0, len(items), size)]


FABRICS = {"hosts": st.integers(1, 24), "leaf_down": st.integers(1, 6), "pod_leaves": st.none() | st.integers(1, 3)}


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(**FABRICS)
def test_the_tree_is_the_one_that_was_generated(hosts: int, leaf_down: int, pod_leaves: int | None) -> None:
    leaves = cut([f"node{number:04}" for number in range(1, hosts + 1)], leaf_down)
    assume(pod_leaves is None or len(leaves) >= pod_leaves)
    pods = [leaves] if pod_leaves is None else cut(leaves, pod_leaves)
    # Spines above a single leaf, and cores above a single pod, join nothing.
    joined = pods[0] if len(pods) == 1 else pods
    expected = frozenset(joined if len(joined) == 1 else [frozenset(joined)])
    fabric = generated(hosts, leaf_down, pod_leaves)
    assert tree(topology_conf(fabric)) == expected
    assert tree(topology_yaml(fabric)) == expected


@settings(max_examples=40, deadline=None)
@given(**FABRICS, rails=st.integers(1, 3))
def test_a_round_trip_changes_nothing(hosts: int, leaf_down: int, pod_leaves: int | None, rails: int) -> None:
    assume(pod_leaves is None or -(-hosts // leaf_down) * rails >= pod_leaves)
    text = topology_conf(generated(hosts, leaf_down, pod_leaves, rails))
    again = build_fabric(slurm.read(text, "converted"))
    assert tree(topology_conf(again)) == tree(text)
    assert tree(topology_yaml(again)) == tree(text)


def test_hosts_with_the_same_leaves_make_one_switch() -> None:
    fabric = generated(8, 4, None, rails=4)
    assert len(fabric.leaves[0]) == 4
    assert tree(topology_conf(fabric)) == frozenset(
        [frozenset([frozenset(f"node{n:04}" for n in range(1, 5)), frozenset(f"node{n:04}" for n in range(5, 9))])]
    )


@pytest.mark.parametrize("name", WRITERS)
def test_golden(name: str) -> None:
    text = WRITERS[name](generated(10, 2, 2))
    path = GOLDEN / name
    if os.environ.get("REGENERATE"):
        path.write_text(text)
    assert text == path.read_text(), f"if the change is meant: REGENERATE=1 python -m pytest {__file__}"


def test_names_that_slurm_reads() -> None:
    text = """\
SwitchName=core Switches=s1,s2
SwitchName=s1 Nodes=n[1-2]
SwitchName=s2 Nodes=n3
"""
    fabric = build_fabric(slurm.read(text, "f"))
    odd = Fabric(**{**vars(fabric), "names": tuple(f"MF0;{name} a,b:[1]" for name in fabric.names)})
    records = [record for record in slurm.read(topology_conf(odd), "f") if isinstance(record, SwitchGroup)]
    assert len({record.name for record in records}) == 3
    assert all(expand_hosts(record.name, "f") == (record.name,) for record in records)
    with refused("HT-host-bad-slurm-name", host="a host"):
        topology_conf(Fabric(**{**vars(fabric), "hosts": ("a host", "n2", "n3")}))


@pytest.mark.parametrize("write", WRITERS.values())
def test_hosts_whose_names_end_in_no_number_are_written_one_by_one(write: Callable[[Fabric], str]) -> None:
    # Slurm refuses n[1-2].example.org and n[1-2]-ib.
    names = ("n1.example.org", "n2.example.org", "r1n1", "r1n2", "n1-ib", "n2-ib")
    fabric = build_fabric(slurm.read(f"SwitchName=leaf Nodes={','.join(names)}\n", "f"))
    text = write(fabric)
    assert re.findall(r"\]([^,\s\"]+)", text) == []
    (hosts,) = tree(text)
    assert hosts == frozenset(names)
