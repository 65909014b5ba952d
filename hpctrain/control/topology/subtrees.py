"""Folds the switches of a fabric into one tree: a fat tree has many spines, and Slurm, pictures and rings need a tree.

Hosts on the same leaves are one subtree. From there upwards, connected subtrees are joined level by level: first by the
switches of the level, which become one, then by cables between switches of that level, which have no switch above them.
A missing cable does not change the tree, and a leaf may be attached at any level.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from hpctrain.control.topology.fabric import Fabric, Ints, components


@dataclass(frozen=True, kw_only=True)
class Subtree:
    """Switches that serve the same hosts, with everything below them.

    Attributes:
        level: the level of the switches; 0 for hosts that are cabled to each other without a switch.
        switches: their nodes; empty where cables between equals, or leaves that hosts share, join the subtrees below.
        hosts: the hosts on exactly these switches; a subtree with hosts has none below.
        below: the subtrees below, in the order of their switches.
    """

    level: int
    switches: tuple[int, ...]
    hosts: tuple[int, ...] = ()
    below: tuple[Subtree, ...] = ()


def subtrees(fabric: Fabric) -> tuple[Subtree, ...]:
    """The trees of a fabric from their tops; one if all hosts can reach each other."""
    ends = _ends(fabric)
    # Each set of leaves is a vertex beyond the fabric's nodes, because a leaf may belong to several sets.
    tops = dict(enumerate(ends, start=len(fabric.names)))
    hung = [(vertex, switch) for vertex, end in tops.items() for switch in end.switches]
    vertex, switch = np.array(hung, np.int32).reshape(-1, 2).T
    nodes = len(fabric.names) + len(tops)
    for level, equals, source, target in _steps(fabric):
        on = fabric.level[switch] <= level
        label = components(nodes, np.concatenate([source, vertex[on]]), np.concatenate([target, switch[on]]))
        tops = _joined(fabric, level, tops, label, equals=equals)
    return tuple(tops.values())


def subtrees_of(fabric: Fabric, adapters: Ints) -> Iterator[Ints]:
    """The subtrees of each adapter: first its switch, or its subnet where it has none, then ever larger ones.

    Yields:
        numbers in the order of the switches, of the shape of ``adapters``; each yield has its own numbers.
    """
    cabled = (fabric.level[fabric.source] == 0) & (fabric.level[fabric.target] >= 1)
    switch = len(fabric.names) + fabric.subnet
    switch[fabric.source[cabled]] = fabric.target[cabled]
    on: Ints = switch[adapters]
    yield on
    for _, _, source, target in _steps(fabric):
        yield components(len(fabric.names) + int(fabric.subnet.max()) + 1, source, target)[on]


def _steps(fabric: Fabric) -> Iterator[tuple[int, bool, Ints, Ints]]:
    """From the leaves up: a level, whether its cables between equals count already, and the cables up to there.

    Leaves have no switches below them, so their only step is that between equals.
    """
    low = np.minimum(fabric.level[fabric.source], fabric.level[fabric.target])
    high = np.maximum(fabric.level[fabric.source], fabric.level[fabric.target])
    for level in range(1, int(fabric.level.max()) + 1):
        for equals in (False, True) if level > 1 else (True,):
            taken = (low >= 1) & ((high < level) | ((high == level) & (equals | (low < level))))
            yield level, equals, fabric.source[taken], fabric.target[taken]


def _ends(fabric: Fabric) -> list[Subtree]:
    """The hosts of each set of leaves, then hosts without leaves, which their own cables connect."""
    groups: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for host, leaves in enumerate(fabric.leaves):
        groups[tuple(sorted(leaves))].append(host)
    bare = groups.pop((), [])
    ends = [
        Subtree(level=int(fabric.level[list(leaves)].max()), switches=leaves, hosts=tuple(hosts))
        for leaves, hosts in sorted(groups.items())
    ]
    return ends + [Subtree(level=0, switches=(), hosts=hosts) for hosts in _cabled_hosts(fabric, bare)]


def _cabled_hosts(fabric: Fabric, bare: Sequence[int]) -> list[tuple[int, ...]]:
    """Hosts without a switch, in groups that their cables connect."""
    owner = np.flatnonzero(np.isin(fabric.host, bare))
    # Hosts and subnets, which are single cables here, are the vertices.
    label = components(
        len(fabric.hosts) + len(fabric.names), fabric.host[owner], len(fabric.hosts) + fabric.subnet[owner]
    )
    together: dict[int, list[int]] = defaultdict(list)
    for host in bare:
        together[int(label[host])].append(host)
    return [tuple(hosts) for hosts in together.values()]


def _joined(fabric: Fabric, level: int, tops: dict[int, Subtree], label: Ints, *, equals: bool) -> dict[int, Subtree]:
    """The tops of the tree after one more step, in which connected tops become one."""
    together: dict[int, list[int]] = defaultdict(list)
    for top in tops:
        together[int(label[top])].append(top)
    switches: dict[int, list[int]] = defaultdict(list)
    for switch in np.flatnonzero(fabric.level == level).tolist():
        switches[int(label[switch])].append(switch)
    joined: dict[int, Subtree] = {}
    for part, below in together.items():
        joining = () if equals else tuple(switches[part])
        if joining or len(below) > 1:
            joined[below[0]] = Subtree(level=level, switches=joining, below=tuple(tops[top] for top in below))
        else:
            joined |= {top: tops[top] for top in below}
    return joined
