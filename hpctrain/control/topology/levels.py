"""The shape of a fabric: leaves, levels of the other switches, and links slower than their peers.

Cables say which switches are joined, and not which one is above. Traffic between hosts climbs and descends again, so
the height of a switch is that to which some shortest path between two leaves climbs at it: the distance to the nearer
of the two leaves. In a tree this is its height over its own leaves, at whatever level of the tree a leaf is attached.
Several roots get the same height, and a lost cable changes no height.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from hpctrain.control.topology.fabric import Floats, Ints, hops

Mask = NDArray[np.bool_]


def levels(is_switch: Mask, is_adapter: Mask, is_service: Mask, source: Ints, target: Ints) -> Ints:
    """The level of each node: 0 for an adapter, 1 for a leaf, more for switches above it (see :func:`_switch_levels`).

    A leaf has adapters. Adapters of service hosts (management, storage) do not make a leaf of a switch that is cabled
    to a leaf of other hosts: it is a spine with a service host on a spare port. Switches without hosts that are on no
    shortest path between two leaves, and nodes that are neither switch nor adapter here, are at -1.

    Args:
        is_switch, is_adapter, is_service: per node; all are False for unused adapters.
        source, target: per directed link, the nodes at its ends.
    """
    occupied = is_switch & _beside(is_adapter, source, target)
    leaf = is_switch & _beside(is_adapter & ~is_service, source, target)
    leaf |= occupied & ~_beside(leaf, source, target)
    switches = np.flatnonzero(is_switch)
    number = np.cumsum(is_switch) - 1
    between = is_switch[source] & is_switch[target]
    rank = _switch_levels(leaf[switches], number[source[between]], number[target[between]])
    level = np.where(is_adapter, 0, -1).astype(np.int32)
    level[switches] = np.where(rank > 0, rank, np.where(occupied[switches], 2, -1))
    return level


def _beside(nodes: Mask, source: Ints, target: Ints) -> Mask:
    """The nodes that are cabled to one of ``nodes``."""
    beside = np.zeros_like(nodes)
    beside[target[nodes[source]]] = True
    return beside


def _switch_levels(is_leaf: Mask, source: Ints, target: Ints) -> Ints:
    """The level of each switch: 1 for a leaf, else one more than the highest switch below it; 0 for a switch on no
    shortest path between two leaves, such as one whose hosts are all off.

    Leaves forward nothing, and cables between them join equals.
    """
    climbing = ~is_leaf[source] | ~is_leaf[target]
    source, target = source[climbing], target[climbing]
    order = np.argsort(source, kind="stable")
    first = np.searchsorted(source[order], np.arange(len(is_leaf) + 1))
    away = hops(np.flatnonzero(is_leaf).astype(np.int32), first, target[order], ~is_leaf)
    heights = _heights(is_leaf, away)
    beside: list[set[int]] = [set() for _ in heights]
    for one, other in zip(source.tolist(), target.tolist(), strict=True):
        beside[one].add(other)
    level = np.zeros(len(heights), np.int32)
    for switch in sorted(range(len(heights)), key=heights.__getitem__):
        below = (level[other] for other in beside[switch] if heights[other] < heights[switch])
        level[switch] = heights[switch] if heights[switch] <= 1 else 1 + max(below, default=1)
    return level


def _heights(is_leaf: Mask, away: NDArray[np.int16]) -> list[int]:
    """The height of each switch: 1 for a leaf, else one more than its greatest distance from the nearer end of a
    shortest path between leaves; 0 for a switch on no such path.

    Args:
        away: the cables from each switch to each leaf through switches without hosts, (switches, leaves).
    """
    heights: list[int] = is_leaf.astype(int).tolist()
    between = away[is_leaf]
    known: dict[bytes, int] = {}
    for switch in np.flatnonzero(~is_leaf).tolist():
        far = away[switch]
        # Switches at the same distances from all leaves, of which a large fabric has many, have one height.
        if (key := far.tobytes()) not in known:
            reached = np.flatnonzero(far > 0)
            near = far[reached]
            on_the_way = np.add.outer(near, near) == between[np.ix_(reached, reached)]
            known[key] = 1 + int(np.minimum.outer(near, near)[on_the_way].max()) if on_the_way.any() else 0
        heights[switch] = known[key]
    return heights


def degraded_links(level: Ints, source: Ints, target: Ints, bandwidth: Floats) -> Iterator[tuple[int, float]]:
    """Links slower than most of their peers, each with its peers' bandwidth; one direction per cable.

    Peers are the links from one leaf to its adapters, and those from one switch to the switches above it.
    """
    peers: dict[tuple[int, int], list[int]] = defaultdict(list)
    for link in np.flatnonzero(level[source] <= level[target]).tolist():
        low, high = int(source[link]), int(target[link])
        kind = int(level[low]), int(level[high])
        if kind[0] < 0 or (kind[0] == kind[1] and low > high):
            continue
        peers[(high, 0) if kind[0] == 0 else (low, kind[1])].append(link)
    for links in peers.values():
        count = Counter(bandwidth[links].tolist())
        usual = max(count, key=lambda rate: (count[rate], rate))
        yield from ((link, usual) for link in links if bandwidth[link] < usual)
