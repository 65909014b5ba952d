"""Forwarding tables for a fabric whose own are unknown: shortest paths, spread by destination."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from hpctrain.topology.fabric import NO_PORT, Fabric, Ints


def min_hop_tables(fabric: Fabric) -> tuple[NDArray[np.int16], Ints, Ints]:
    """Shortest paths over switches, which in a fat tree go up and then down.

    Among equally short ways the destination decides, by the rule known as D-mod-k (Zahavi, "D-Mod-K Routing Providing
    Non-Blocking Traffic for Shift Permutations on Real Life Fat Trees", 2010): destinations are numbered leaf by leaf;
    the cable between levels ``h`` and ``h + 1`` is that number, divided by the up links of the levels below ``h``,
    modulo the ways there are.

    Returns:
        tables: (switches, adapters), the port towards each adapter, ``NO_PORT`` where there is no way.
        switches: the node of each row.
        column: of each node: its column, for adapters.
    """
    switches = np.flatnonzero(fabric.level > 0)
    row = np.full(len(fabric.names), -1)
    row[switches] = np.arange(len(switches))
    down = np.flatnonzero((row[fabric.source] >= 0) & (fabric.level[fabric.target] == 0))
    down = down[np.lexsort((fabric.source_port[down], fabric.source[down]))]
    adapters, leaf_row = fabric.target[down], row[fabric.source[down]]
    column = np.full(len(fabric.names), -1)
    column[adapters] = np.arange(len(adapters))

    leaves = np.unique(leaf_row)
    leaf = np.searchsorted(leaves, leaf_row).astype(np.int32)
    cables = np.flatnonzero((row[fabric.source] >= 0) & (row[fabric.target] >= 0))
    # Parallel cables side by side, so that the way up and the way down use the same one.
    cables = cables[np.lexsort((fabric.source_port[cables], fabric.target[cables], fabric.source[cables]))]
    near, far, port = row[fabric.source[cables]], row[fabric.target[cables]], fabric.source_port[cables]
    distance = _distances(len(switches), near, far, leaves)
    level = fabric.level[switches]
    digits = _digits(level, near, far, len(adapters))

    tables = np.full((len(switches), len(adapters)), NO_PORT, np.int16)
    first = np.searchsorted(near, np.arange(len(switches) + 1))
    for switch in range(len(switches)):
        mine = slice(first[switch], first[switch + 1])
        nearer = distance[far[mine]] == distance[switch] - 1
        if nearer.any():
            crossed = np.minimum(level[switch], level[far[mine]])
            tables[switch] = _ports(nearer, port[mine], crossed, leaf, digits)
    tables[leaf_row, column[adapters]] = fabric.source_port[down]
    return tables, switches.astype(np.int32), column.astype(np.int32)


def _ports(nearer: NDArray[np.bool_], port: Ints, crossed: Ints, leaf: Ints, digits: Ints) -> Ints:
    """The port of one switch towards each adapter.

    Args:
        nearer: (cables, leaves), whether what is behind the cable is nearer to the leaf.
        port, crossed: of each cable: its port, and the lower of the levels that it joins.
        leaf: of each adapter.
        digits: of each level and adapter.
    """
    target, way = np.nonzero(nearer.T)
    ways = np.bincount(target, minlength=nearer.shape[1]).astype(np.int32)
    start = np.minimum(np.cumsum(ways, dtype=np.int32) - ways, len(way) - 1)
    digit = digits[crossed[way[start]][leaf], np.arange(len(leaf))]
    choice = way[start[leaf] + digit % np.maximum(ways, 1)[leaf]]
    return np.where((ways > 0)[leaf], port[choice], NO_PORT)


def _distances(switches: int, near: Ints, far: Ints, leaves: Ints) -> NDArray[np.int16]:
    """Hops from each switch to each leaf, (switches, leaves), -1 where it cannot be reached: a breadth-first search of
    all leaves at once."""
    cabled = np.zeros((switches, switches), np.float32)
    cabled[near, far] = 1
    frontier = np.zeros((switches, len(leaves)), np.float32)
    frontier[leaves, np.arange(len(leaves))] = 1
    distance = np.where(frontier > 0, 0, -1).astype(np.int16)
    hops = 0
    while frontier.any():
        hops += 1
        reached = (cabled @ frontier > 0) & (distance < 0)
        distance[reached] = hops
        frontier = reached.astype(np.float32)
    return distance


def _digits(level: Ints, near: Ints, far: Ints, adapters: int) -> Ints:
    """Of each level: the numbers of all destinations divided by the usual up links of the levels below, (levels + 1,
    adapters)."""
    up = np.bincount(near, level[far] > level[near], minlength=len(level))
    widths = [max(1, int(np.median(up[level == height]))) for height in range(1, level.max(initial=1) + 1)]
    divisors = np.cumprod([1, 1, *widths[:-1]])
    return (np.arange(adapters) // divisors[:, None]).astype(np.int32)
