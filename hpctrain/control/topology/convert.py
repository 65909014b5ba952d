"""Converts a fabric to Slurm's topology files.

Slurm needs a tree, and a fat tree has many spines: it is folded (:mod:`hpctrain.control.topology.subtrees`), and each
subtree becomes one switch. Slurm has hosts on leaves only, so hosts on an upper switch get a leaf of their own. Cables
between switches of one level become a switch above them, since Slurm gives no job hosts that no switch joins.

Source: https://slurm.schedmd.com/topology.conf.html
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from hpctrain.common.cluster.host_list import fold_hosts
from hpctrain.common.errors import HpctrainError
from hpctrain.control.topology.fabric import Fabric
from hpctrain.control.topology.subtrees import Subtree, subtrees

# The names of switches that stand for cables, or for hosts on an upper switch.
_JOINS, _HOSTS = "joins-{}", "hosts-on-{}"


class Switch(NamedTuple):
    """A switch of the tree; ``below`` is Slurm's list of its hosts, or of the switches below it."""

    name: str
    is_leaf: bool
    below: str


def topology_conf(fabric: Fabric) -> str:
    """Slurm's topology.conf for ``TopologyPlugin=topology/tree``.

    Raises:
        HpctrainError: a host has a name that Slurm cannot read.
    """
    return "".join(
        f"SwitchName={switch.name} {'Nodes' if switch.is_leaf else 'Switches'}={switch.below}\n"
        for switch in _switches(fabric)
    )


def topology_yaml(fabric: Fabric) -> str:
    """Slurm's topology.yaml with the fabric as a tree, the default topology."""
    lines = ["- topology: fabric", "  cluster_default: true", "  tree:", "    switches:"]
    for switch in _switches(fabric):
        key = "nodes" if switch.is_leaf else "children"
        lines += [f'      - switch: "{switch.name}"', f'        {key}: "{switch.below}"']
    return "\n".join(lines) + "\n"


def _switches(fabric: Fabric) -> list[Switch]:
    """The switches depth-first: each above those below it, neighbours side by side."""
    for host in fabric.hosts:
        if not re.fullmatch(r"[\w.-]+", host, re.ASCII):
            raise HpctrainError(
                "HT-host-bad-slurm-name",
                "{host!r} is not a name of a host in Slurm",
                "rename it, or leave it out of the fabric",
                host=host,
            )
    names = _Names()
    return [switch for tree in subtrees(fabric) for switch in _with_all_below(fabric, tree, names)]


def _with_all_below(fabric: Fabric, tree: Subtree, names: _Names) -> list[Switch]:
    branches = [_with_all_below(fabric, subtree, names) for subtree in tree.below]
    tops = [branch[0].name for branch in branches]
    hosts = [fabric.hosts[host] for host in tree.hosts]
    if tree.switches:
        name = min(fabric.names[switch] for switch in tree.switches) if tops else fabric.names[tree.switches[0]]
        if hosts and tree.level > 1:
            name = _HOSTS.format(name)
    else:
        name = _JOINS.format(tops[0] if tops else hosts[0])
    below = ",".join(tops) if tops else _host_list(hosts)
    top = Switch(names.unique(name), not tops, below)
    return [top, *(switch for branch in branches for switch in branch)]


def _host_list(hosts: Sequence[str]) -> str:
    # Slurm reads no list with anything behind its last bracket, such as n[1-2].example.org.
    folded = fold_hosts([host for host in hosts if host[-1].isdecimal()])
    return ",".join(filter(None, [folded, *(host for host in hosts if not host[-1].isdecimal())]))


class _Names:
    """Unique names made of the characters that Slurm accepts."""

    def __init__(self) -> None:
        self._taken: set[str] = set()

    def unique(self, description: str) -> str:
        base = re.sub(r"[^\w.+-]+", "-", description, flags=re.ASCII).strip("-") or "switch"
        name, number = base, 1
        while name in self._taken:
            number += 1
            name = f"{base}-{number}"
        self._taken.add(name)
        return name
