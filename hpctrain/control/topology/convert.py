"""Converts a fabric to Slurm's topology files.

Slurm needs a tree, and a fat tree has many spines: it is folded (:mod:`hpctrain.control.topology.subtrees`), and each
subtree becomes one switch. Slurm has hosts on leaves only, so hosts on an upper switch get a leaf of their own. Cables
between switches of one level become a switch above them, since Slurm gives no job hosts that no switch joins.

Source: https://slurm.schedmd.com/topology.conf.html
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from hpctrain.common.cluster.host_list import fold_hosts
from hpctrain.common.errors import HpctrainError
from hpctrain.control.topology.fabric import Fabric
from hpctrain.control.topology.subtrees import Subtree, subtrees

# The names of switches that stand for cables, or for hosts on an upper switch.
_JOINS, _HOSTS = "joins-{}", "hosts-on-{}"


@dataclass(frozen=True, kw_only=True)
class Switch:
    """A switch of the tree, with hosts or switches below it."""

    name: str
    hosts: tuple[str, ...] = ()
    switches: tuple[Switch, ...] = ()

    @property
    def below(self) -> str:
        """The hosts or switches below it, as Slurm's list."""
        if self.switches:
            return ",".join(switch.name for switch in self.switches)
        # Slurm reads no list with anything behind its last bracket, such as n[1-2].example.org.
        folded = fold_hosts([host for host in self.hosts if host[-1].isdecimal()])
        return ",".join(filter(None, [folded, *(host for host in self.hosts if not host[-1].isdecimal())]))

    def depth_first(self) -> Iterator[Switch]:
        """This switch and all below it."""
        yield self
        for switch in self.switches:
            yield from switch.depth_first()


def topology_conf(fabric: Fabric) -> str:
    """Slurm's topology.conf for ``TopologyPlugin=topology/tree``.

    Raises:
        HpctrainError: a host has a name that Slurm cannot read.
    """
    return "".join(
        f"SwitchName={switch.name} {'Switches' if switch.switches else 'Nodes'}={switch.below}\n"
        for switch in _tree(fabric)
    )


def topology_yaml(fabric: Fabric) -> str:
    """Slurm's topology.yaml with the fabric as a tree, the default topology."""
    lines = ["- topology: fabric", "  cluster_default: true", "  tree:", "    switches:"]
    for switch in _tree(fabric):
        key = "children" if switch.switches else "nodes"
        lines += [f'      - switch: "{switch.name}"', f'        {key}: "{switch.below}"']
    return "\n".join(lines) + "\n"


def _tree(fabric: Fabric) -> list[Switch]:
    """The switches depth-first: each above those below it, neighbours side by side."""
    _require_names(fabric)
    names = _Names()
    tops = [_switch(fabric, tree, names) for tree in subtrees(fabric)]
    return [switch for top in tops for switch in top.depth_first()]


def _require_names(fabric: Fabric) -> None:
    for host in fabric.hosts:
        if not re.fullmatch(r"[\w.-]+", host, re.ASCII):
            raise HpctrainError(
                "HT-host-bad-slurm-name",
                "{host!r} is not a name of a host in Slurm",
                "rename it, or leave it out of the fabric",
                host=host,
            )


def _switch(fabric: Fabric, tree: Subtree, names: _Names) -> Switch:
    below = tuple(_switch(fabric, subtree, names) for subtree in tree.below)
    hosts = tuple(fabric.hosts[host] for host in tree.hosts)
    if tree.switches:
        name = min(fabric.names[switch] for switch in tree.switches) if below else fabric.names[tree.switches[0]]
        if hosts and tree.level > 1:
            name = _HOSTS.format(name)
    else:
        name = _JOINS.format(below[0].name if below else hosts[0])
    return Switch(name=names.unique(name), hosts=hosts, switches=below)


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
