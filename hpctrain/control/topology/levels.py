"""The shape of a fabric: leaves, levels of the other switches, subtrees, and links slower than their peers.

Cables say which switches are joined, and not which one is above. Traffic between hosts climbs and descends again, so
the height of a switch is that to which some shortest path between two leaves climbs at it: the distance to the nearer
of the two leaves. In a tree this is its height over its own leaves, at whatever level of the tree a leaf is attached.
Several roots get the same height, and a lost cable changes no height.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from hpctrain.control.topology.fabric import Fabric, Floats, Ints, components, hops

Mask = NDArray[np.bool_]

# Added to the height of a switch that stands above another of the same height.
_ABOVE = 0.5


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
    if (is_adapter & ~is_service).any():
        leaf = is_switch & _beside(is_adapter & ~is_service, source, target)
        leaf |= occupied & ~_beside(leaf, source, target)
    else:
        leaf = occupied
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

    Leaves forward nothing, and cables between them join equals, with one exception: a leaf that alone connects
    switches without hosts is above them, as a root is that has a host on a spare port. Of two switches of the same
    height on one cable, the one with a single switch below it is above the other.
    """
    passes = ~is_leaf | _connecting_leaves(is_leaf, source, target)
    climbing = passes[source] | passes[target]
    beside: list[set[int]] = [set() for _ in is_leaf]
    for one, other in zip(source[climbing].tolist(), target[climbing].tolist(), strict=True):
        beside[one].add(other)
    order = np.argsort(source[climbing], kind="stable")
    first = np.searchsorted(source[climbing][order], np.arange(len(is_leaf) + 1))
    away = hops(np.flatnonzero(is_leaf).astype(np.int32), first, target[climbing][order], passes)
    heights = _heights(is_leaf, passes, away)
    rank = [height + _ABOVE * _stands_above(switch, beside, heights) for switch, height in enumerate(heights)]
    level = np.zeros(len(rank), np.int32)
    for switch in sorted(range(len(rank)), key=rank.__getitem__):
        below = (level[other] for other in beside[switch] if rank[other] < rank[switch])
        level[switch] = int(rank[switch]) if rank[switch] <= 1 else 1 + max([1, *below])
    return level


def _connecting_leaves(is_leaf: Mask, source: Ints, target: Ints) -> Mask:
    """The leaves without which some switches without hosts would be disconnected from the others."""
    inner = ~is_leaf[source] & ~is_leaf[target]
    component = components(len(is_leaf), source[inner], target[inner])
    down = is_leaf[target] & ~is_leaf[source]
    part, leaf = np.divmod(
        np.unique(component[source[down]].astype(np.int64) * len(is_leaf) + target[down]), len(is_leaf)
    )
    several = np.bincount(part, minlength=len(is_leaf))[part] > 1
    part, leaf = part[several], leaf[several]
    joining = np.zeros(len(is_leaf), np.bool_)
    shared = np.unique(leaf, return_counts=True)
    for one in shared[0][shared[1] > 1].tolist():
        rest = leaf != one
        without = components(2 * len(is_leaf), leaf[rest], len(is_leaf) + part[rest])
        joining[one] = len(np.unique(without[len(is_leaf) + part[~rest]])) > 1
    return joining


def _heights(is_leaf: Mask, passes: Mask, away: NDArray[np.int16]) -> list[int]:
    """The height of each switch: 1 for a leaf, else one more than its greatest distance from the nearer end of a
    shortest path between leaves; 0 for a switch on no such path.

    Args:
        away: the cables from each switch to each leaf through switches that forward, (switches, leaves).
    """
    heights: list[int] = is_leaf.astype(int).tolist()
    between = away[is_leaf]
    known: dict[bytes, int] = {}
    for switch in np.flatnonzero(passes).tolist():
        far = away[switch]
        # Switches at the same distances from all leaves, of which a large fabric has many, have one height.
        if (key := far.tobytes()) not in known:
            reached = np.flatnonzero(far > 0)
            near = far[reached]
            on_the_way = np.add.outer(near, near) == between[np.ix_(reached, reached)]
            known[key] = 1 + int(np.minimum.outer(near, near)[on_the_way].max()) if on_the_way.any() else 0
        heights[switch] = max(heights[switch], known[key])
    return heights


def _stands_above(switch: int, beside: Sequence[set[int]], heights: Sequence[int]) -> bool:
    """Whether a switch has one switch below it, and is cabled to one of its height that has several others."""
    mine = _below(switch, beside, heights)
    if heights[switch] < 2 or len(mine) != 1:
        return False
    equals = (other for other in beside[switch] if heights[other] == heights[switch])
    theirs = [_below(other, beside, heights) for other in equals]
    return any(len(those) > 1 and not those & mine for those in theirs)


def _below(switch: int, beside: Sequence[set[int]], heights: Sequence[int]) -> set[int]:
    return {other for other in beside[switch] if 0 < heights[other] < heights[switch]}


def subtrees_of(fabric: Fabric, adapters: Ints) -> Iterator[Ints]:
    """The subtrees of each adapter: first its switch, or its subnet where it has none, then ever larger ones.

    A fat tree has many spines, so what its cables connect is joined level by level: first by the switches of the level,
    which become one, then by cables between switches of that level, which have no switch above them. A missing cable
    does not change the tree, and a leaf may be attached at any level.

    Yields:
        numbers in the order of the switches, of the shape of ``adapters``; each yield has its own numbers.
    """
    cabled = (fabric.level[fabric.source] == 0) & (fabric.level[fabric.target] >= 1)
    switch = len(fabric.names) + fabric.subnet
    switch[fabric.source[cabled]] = fabric.target[cabled]
    on: Ints = switch[adapters]
    yield on
    nodes = len(fabric.names) + int(fabric.subnet.max()) + 1
    low = np.minimum(fabric.level[fabric.source], fabric.level[fabric.target])
    high = np.maximum(fabric.level[fabric.source], fabric.level[fabric.target])
    for level in range(1, int(fabric.level.max()) + 1):
        # Leaves have no switches below them, so they are joined by cables between equals alone.
        for equals in (False, True) if level > 1 else (True,):
            taken = (low >= 1) & ((high < level) | ((high == level) & (equals | (low < level))))
            yield components(nodes, fabric.source[taken], fabric.target[taken])[on]


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
