"""Fabrics written down as cables, for tests."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import numpy as np

from hpctrain.control.topology.fabric import Fabric

LEVELS = {"leaf": 1, "spine": 2, "core": 3}


def small_fabric(cables: Iterable[tuple[str, str] | tuple[str, str, float]]) -> Fabric:
    """A fabric of cables (end, end, bytes a second = 2.0).

    Switches are called leaf0, spine0, core0; any other name is an adapter, "host device". Nodes are numbered in the
    order of their names, ports in the order of the cables.
    """
    ends = [(one, other, *(width or [2.0])) for one, other, *width in cables]
    names = sorted({name for one, other, _ in ends for name in (one, other)})
    level = [LEVELS.get(name.rstrip("0123456789"), 0) for name in names]
    hosts = sorted({name.split()[0] for name, height in zip(names, level, strict=True) if height == 0})
    ports: Counter[str] = Counter()
    links = []
    for one, other, width in ends:
        ports.update([one, other])
        links += [(names.index(one), names.index(other), ports[one], width)]
        links += [(names.index(other), names.index(one), ports[other], width)]
    source, target, port, bandwidth = (np.array(column) for column in zip(*links, strict=True))
    return Fabric(
        names=tuple(names),
        level=np.array(level, np.int32),
        subnet=np.zeros(len(names), np.int32),
        lid=np.zeros(len(names), np.int32),
        host=np.array([hosts.index(n.split()[0]) if n.split()[0] in hosts else -1 for n in names], np.int32),
        hosts=tuple(hosts),
        source=source.astype(np.int32),
        target=target.astype(np.int32),
        source_port=port.astype(np.int32),
        bandwidth=bandwidth.astype(np.float64),
    )


def two_levels(sizes: Iterable[int], *, spines: int, rails: int = 1, cables: int = 1) -> Fabric:
    """Leaves with ``sizes`` hosts, all rails of a host on one leaf, each leaf with ``cables`` to each spine."""
    laid = []
    host = 0
    for leaf, size in enumerate(sizes):
        for _ in range(size):
            laid += [(f"h{host:02d} m{rail}", f"leaf{leaf}") for rail in range(rails)]
            host += 1
        laid += [(f"leaf{leaf}", f"spine{spine}") for _ in range(cables) for spine in range(spines)]
    return small_fabric(laid)
