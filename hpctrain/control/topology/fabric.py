"""The fabric: hosts, adapters, switches and the links between them, as arrays."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int32]
Floats = NDArray[np.float64]

# The entry of a forwarding table for a destination without a port.
NO_PORT = -1


@dataclass(frozen=True, kw_only=True)
class Fabric:
    """A switch graph. Nodes and directed links are numbered from 0; a cable is two links.

    Attributes:
        names: a unique name per node: a switch's description or an adapter's own name.
        level: per node: 0 for an adapter, 1 for a leaf (a switch with adapters of hosts), 2 and up for the switches
            above, each one more than the highest below it; -1 for switches that join no hosts.
        subnet: per node, its connected component.
        lid: per node (for adapters, that of the port), 0 where unknown.
        host: per node, the number of its host; -1 for switches.
        hosts: the name of each host, by its number.
        source, target: per directed link, the nodes at its ends.
        source_port: per directed link, the port by which it leaves.
        bandwidth: per directed link, bytes of payload a second; 1.0 for all where the format has no speeds.
        tables: forwarding tables, (switches of ``table_switches``, largest LID + 1): the port towards each LID,
            ``NO_PORT`` where there is none; None where no tables were read.
        table_switches: the node of each row of ``tables``.
        warnings: irregularities of the fabric, one sentence each.
    """

    names: tuple[str, ...]
    level: Ints
    subnet: Ints
    lid: Ints
    host: Ints
    hosts: tuple[str, ...]
    source: Ints
    target: Ints
    source_port: Ints
    bandwidth: Floats
    tables: NDArray[np.int16] | None = None
    table_switches: Ints = field(default_factory=lambda: np.empty(0, np.int32))
    warnings: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        nodes, links = len(self.names), len(self.source)
        assert all(len(column) == nodes for column in (self.level, self.subnet, self.lid, self.host))
        assert all(len(column) == links for column in (self.target, self.source_port, self.bandwidth))

    def adapters(self, host: int) -> Ints:
        """The adapters of a host in the order of their names: its rails."""
        return np.flatnonzero(self.host == host).astype(np.int32)

    @cached_property
    def leaves(self) -> tuple[frozenset[int], ...]:
        """The switches of each host, usually leaves: several if its rails lead to different ones, none if it is cabled
        to another host without a switch.
        """
        leaves: list[set[int]] = [set() for _ in self.hosts]
        cables = (self.host[self.source] >= 0) & (self.level[self.target] >= 1)
        for host, leaf in zip(self.host[self.source[cables]].tolist(), self.target[cables].tolist(), strict=True):
            leaves[host].add(leaf)
        return tuple(map(frozenset, leaves))

    @property
    def has_speeds(self) -> bool:
        """Whether the format contains the bandwidth of links."""
        return bool((self.bandwidth != 1.0).any())


def components(nodes: int, source: Ints, target: Ints) -> Ints:
    """The connected component of each node, numbered from 0 in the order of their lowest nodes.

    Args:
        source, target: the ends of each edge, in either direction.
    """
    label = np.arange(nodes)
    one, other = np.concatenate([source, target]), np.concatenate([target, source])
    while True:
        smaller = label.copy()
        np.minimum.at(smaller, other, label[one])
        # A node also takes the label of its label's node, which halves long chains.
        smaller = smaller[smaller]
        if np.array_equal(smaller, label):
            return np.unique(label, return_inverse=True)[1].astype(np.int32)
        label = smaller


def hops(ends: Ints, first: NDArray[np.intp], far: Ints, passes: NDArray[np.bool_] | None = None) -> NDArray[np.int16]:
    """The cables from each node to each of some nodes, by a breadth-first search with a bit for each of these.

    Args:
        first, far: the nodes at the other end of the cables of node ``i`` are ``far[first[i]:first[i + 1]]``.
        passes: the nodes through which a way may lead; by default all.

    Returns:
        of shape (nodes, ends), -1 where no way leads.
    """
    near = np.flatnonzero(np.diff(first))
    starts = first[near]
    counts = np.full((len(first) - 1, len(ends)), -1, np.int16)
    counts[ends, np.arange(len(ends))] = 0
    seen = np.packbits(counts >= 0, axis=1)
    frontier, distance = seen, 0
    while frontier.any() and near.size:
        distance += 1
        reached = np.zeros_like(seen)
        reached[near] = np.bitwise_or.reduceat(frontier[far], starts, axis=0)
        frontier = reached & ~seen
        seen = seen | frontier
        counts[np.unpackbits(frontier, axis=1, count=len(ends)).view(np.bool_)] = distance
        if passes is not None:
            frontier = np.where(passes[:, None], frontier, 0).astype(np.uint8)
    return counts
