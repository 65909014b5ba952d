"""Converts a fabric to Slurm's topology files.

Slurm needs a tree, and a fat tree has many spines: it is folded (:mod:`hpctrain.control.topology.subtrees`), and each
subtree becomes one switch. Slurm has hosts on leaves only, so hosts on an upper switch get a leaf of their own. Cables
between switches of one level become a switch above them, since Slurm gives no job hosts that no switch joins.

Source: https://slurm.schedmd.com/topology.conf.html
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import chain, count
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
    taken: set[str] = set()
    return [switch for tree in subtrees(fabric) for switch in _with_all_below(fabric, tree, taken)]


def _with_all_below(fabric: Fabric, tree: Subtree, taken: set[str]) -> list[Switch]:
    branches = [_with_all_below(fabric, subtree, taken) for subtree in tree.below]
    tops = [branch[0].name for branch in branches]
    hosts = [fabric.hosts[host] for host in tree.hosts]
    if tree.switches:
        name = min(fabric.names[switch] for switch in tree.switches) if tops else fabric.names[tree.switches[0]]
        if hosts and tree.level > 1:
            name = _HOSTS.format(name)
    else:
        name = _JOINS.format(tops[0] if tops else hosts[0])
    below = ",".join(tops) if tops else _host_list(hosts)
    top = Switch(_unique(name, taken), not tops, below)
    return [top, *(switch for branch in branches for switch in branch)]


def _host_list(hosts: Sequence[str]) -> str:
    # Slurm reads no list with anything behind its last bracket, such as n[1-2].example.org.
    folded = fold_hosts([host for host in hosts if host[-1].isdecimal()])
    return ",".join(filter(None, [folded, *(host for host in hosts if not host[-1].isdecimal())]))


def _unique(description: str, taken: set[str]) -> str:
    """A name that is not taken yet, of the characters that Slurm accepts."""
    base = re.sub(r"[^\w.+-]+", "-", description, flags=re.ASCII).strip("-") or "switch"
    numbered = (f"{base}-{number}" for number in count(2))
    name = next(name for name in chain([base], numbered) if name not in taken)
    taken.add(name)
    return name
