"""A fabric to Slurm's topology files.

Slurm wants a tree, and a fat tree has many spines: what is above the leaves is folded. Hosts with the same set of
leaves become one leaf switch, and all switches up to a level that hang together become one switch of that level. The
tree that comes out is the fabric's: two hosts that share a switch at a level there share one here.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import networkx as nx
import numpy as np

from hpctrain.cluster.host_list import fold_hosts
from hpctrain.errors import HpctrainError
from hpctrain.topology.fabric import Fabric


@dataclass(frozen=True, kw_only=True)
class Switch:
    """A switch of the tree: it has hosts or switches below it."""

    name: str
    hosts: tuple[str, ...] = ()
    switches: tuple[Switch, ...] = ()

    @property
    def below(self) -> str:
        """What is below it, as Slurm's list."""
        return ",".join(switch.name for switch in self.switches) or fold_hosts(self.hosts)

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


def block(fabric: Fabric) -> str:
    """Slurm's topology.conf for ``TopologyPlugin=topology/block``: a block a leaf, neighbours side by side.

    Raises:
        HpctrainError: as of :func:`topology_conf`.
    """
    leaves = _leaves(fabric)
    lines = [f"BlockName={leaf.name} Nodes={leaf.below}\n" for leaf in leaves]
    return "".join([*lines, f"BlockSizes={_block_size(leaves)}\n"])


def topology_yaml(fabric: Fabric) -> str:
    """Slurm's topology.yaml with the fabric as a tree, the default topology.

    Raises:
        HpctrainError: as of :func:`topology_conf`.
    """
    lines = ["- topology: fabric", "  cluster_default: true", "  tree:", "    switches:"]
    for switch in _tree(fabric):
        key = "children" if switch.switches else "nodes"
        lines += [f'      - switch: "{switch.name}"', f'        {key}: "{switch.below}"']
    return "\n".join(lines) + "\n"


def block_yaml(fabric: Fabric) -> str:
    """Slurm's topology.yaml with the fabric's leaves as blocks, the default topology.

    Raises:
        HpctrainError: as of :func:`topology_conf`.
    """
    leaves = _leaves(fabric)
    lines = ["- topology: fabric", "  cluster_default: true", "  block:"]
    lines += ["    block_sizes:", f"      - {_block_size(leaves)}", "    blocks:"]
    for leaf in leaves:
        lines += [f'      - block: "{leaf.name}"', f'        nodes: "{leaf.below}"']
    return "\n".join(lines) + "\n"


def _leaves(fabric: Fabric) -> list[Switch]:
    return [switch for switch in _tree(fabric) if switch.hosts]


def _block_size(blocks: Sequence[Switch]) -> int:
    """Slurm plans by blocks of this many hosts, and no block may have fewer."""
    return min(len(block.hosts) for block in blocks)


def _tree(fabric: Fabric) -> list[Switch]:
    """The switches depth-first: each above those below it, neighbours side by side."""
    for host in fabric.hosts:
        if not re.fullmatch(r"[\w.-]+", host, re.ASCII):
            raise HpctrainError(f"{host!r} is no name of a host in Slurm", "rename it, or leave it out of the fabric")
    names = _Names()
    tops: dict[int, Switch] = {}
    graph = nx.Graph()
    for leaves, hosts in _hosts_by_leaves(fabric).items():
        # A vertex of its own, beyond the fabric's: one leaf may belong to several sets.
        vertex = len(fabric.names) + len(tops)
        graph.add_edges_from((vertex, leaf) for leaf in leaves)
        name = names.unique(fabric.names[leaves[0]])
        tops[vertex] = Switch(name=name, hosts=tuple(fabric.hosts[host] for host in hosts))
    lower = np.minimum(fabric.level[fabric.source], fabric.level[fabric.target])
    upper = np.maximum(fabric.level[fabric.source], fabric.level[fabric.target])
    for level in range(2, int(fabric.level.max()) + 1):
        joins = (lower >= 1) & (upper <= level)
        graph.add_edges_from(zip(fabric.source[joins].tolist(), fabric.target[joins].tolist(), strict=True))
        tops = _join(fabric, graph, level, tops, names)
    return [switch for top in tops.values() for switch in top.depth_first()]


def _join(
    fabric: Fabric, graph: nx.Graph[int], level: int, tops: dict[int, Switch], names: _Names
) -> dict[int, Switch]:
    """The tops of the tree with one level more: those that hang together become one."""
    joined: dict[int, Switch] = {}
    for component in nx.connected_components(graph):
        below = sorted(component & tops.keys())
        switches = [fabric.names[node] for node in component - tops.keys() if _level(fabric, node) == level]
        if below and switches:
            joined[below[0]] = Switch(name=names.unique(min(switches)), switches=tuple(tops[top] for top in below))
        else:
            joined.update((top, tops[top]) for top in below)
    return dict(sorted(joined.items()))


def _level(fabric: Fabric, vertex: int) -> int:
    """The level of a switch; 0 of a vertex that stands for hosts."""
    return int(fabric.level[vertex]) if vertex < len(fabric.names) else 0


def _hosts_by_leaves(fabric: Fabric) -> dict[tuple[int, ...], list[int]]:
    """The hosts of each set of leaves."""
    groups: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for host, leaves in enumerate(fabric.leaves):
        if leaves:
            groups[tuple(sorted(leaves))].append(host)
    return groups


class _Names:
    """Names for Slurm: of the characters that it reads, each once."""

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
