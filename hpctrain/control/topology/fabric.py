"""The fabric: hosts, adapters, switches and the links between them, as arrays."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int32]
Floats = NDArray[np.float64]

# What a port of a table says of a destination that it does not know.
NO_PORT = -1


@dataclass(frozen=True, kw_only=True)
class Fabric:
    """A switch graph. Nodes and directed links are numbered from 0; a cable is two links.

    Attributes:
        names: of each node (a switch's description, an adapter's own name), unique.
        level: of each node: 0 an adapter, 1 a leaf switch (it has adapters of hosts), 2 and up the switches above it,
            each one more than the highest below it; -1 for nodes that take no part (SHARP aggregation nodes, switches
            that join no hosts).
        subnet: of each node: its connected component.
        lid: of each node (an adapter's port), 0 where unknown.
        host: of each node: the number of its host, -1 for switches and nodes that take no part.
        hosts: names of the hosts.
        source, target: of each directed link: the nodes at its ends.
        source_port: of each directed link: the port by which it leaves.
        bandwidth: of each directed link, bytes a second of payload; 1.0 for all where the format has no speeds.
        tables: forwarding tables, (switches of ``table_switches``, largest LID + 1): the port towards each LID,
            ``NO_PORT`` where there is none; None where no tables were read.
        table_switches: the node of each row of ``tables``.
        block_sizes: the hosts of a block and of each larger block, where a file of Slurm's blocks states them; the
            leaves are then in the order of the blocks.
        warnings: what is odd in it, in sentences.
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
    block_sizes: tuple[int, ...] = ()
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
        """The switches of each host, usually leaves; several if its rails lead to different ones.

        None where hosts are cabled to each other without a switch.
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
