"""The shape of a fabric: leaves, levels of the other switches, and the oversubscription of each leaf."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from hpctrain.control.topology.fabric import Fabric, Floats, Ints
from hpctrain.control.topology.heights import ranks

Mask = NDArray[np.bool_]


def levels(is_switch: Mask, is_adapter: Mask, is_service: Mask, source: Ints, target: Ints) -> Ints:
    """The level of each node: 0 an adapter, 1 a leaf, above that as the switches stand above each other
    (:func:`hpctrain.control.topology.heights.ranks`).

    A leaf has adapters. Those of service hosts (management, storage) do not make a leaf of a switch that is cabled to
    a leaf of other hosts: that is a spine on which somebody found a free port. Switches without hosts that no shortest
    way between two leaves takes, and nodes that are neither switch nor adapter here, are at -1.

    Args:
        is_switch, is_adapter, is_service: of each node; adapters that take no part are False in all.
        source, target: of each directed link.
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
    rank = ranks(leaf[switches], number[source[between]], number[target[between]])
    level = np.where(is_adapter, 0, -1).astype(np.int32)
    level[switches] = np.where(rank > 0, rank, np.where(occupied[switches], 2, -1))
    return level


def _beside(nodes: Mask, source: Ints, target: Ints) -> Mask:
    """The nodes that are cabled to one of ``nodes``."""
    beside = np.zeros_like(nodes)
    beside[target[nodes[source]]] = True
    return beside


def oversubscription(fabric: Fabric) -> dict[int, float]:
    """For each leaf: its bandwidth to adapters over its bandwidth to other switches.

    1 and below is non-blocking; infinite where a leaf is cabled to no other switch.
    """
    from_leaf = fabric.level[fabric.source] == 1
    below = fabric.level[fabric.target]
    down = _sums(fabric, from_leaf & (below == 0))
    up = _sums(fabric, from_leaf & (below > 0))
    leaves = np.flatnonzero(fabric.level == 1).tolist()
    return {leaf: float(down[leaf] / up[leaf]) if up[leaf] else float("inf") for leaf in leaves}


def _sums(fabric: Fabric, links: Mask) -> Floats:
    return np.bincount(fabric.source[links], fabric.bandwidth[links], len(fabric.names)).astype(np.float64)


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
