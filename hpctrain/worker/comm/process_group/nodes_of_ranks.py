"""The nodes of a group's ranks, and which ranks send and receive between nodes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class NodesOfRanks:
    """The ranks of a group by node, seen from one of them.

    A node's messages are divided among its ranks by their index on the node, so that all of them drive the network and
    each byte travels to a node once.

    Attributes:
        rank: this process's rank in the group.
        nodes: the ranks of each node in ascending order; nodes in the order of their first rank.
    """

    rank: int
    nodes: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, rank: int, homes: Sequence[int]) -> NodesOfRanks:
        """Make it from ``homes``: by rank, the first rank of the rank's node."""
        firsts = dict.fromkeys(homes)
        return cls(rank, tuple(tuple(r for r, home in enumerate(homes) if home == first) for first in firsts))

    @cached_property
    def size(self) -> int:
        """The number of ranks in the group."""
        return sum(map(len, self.nodes))

    @cached_property
    def _place(self) -> dict[int, tuple[int, int]]:
        return {rank: (node, index) for node, ranks in enumerate(self.nodes) for index, rank in enumerate(ranks)}

    @cached_property
    def node(self) -> int:
        """The number of this rank's node."""
        return self._place[self.rank][0]

    @cached_property
    def here(self) -> tuple[int, ...]:
        """The ranks of this node."""
        return self.nodes[self.node]

    @cached_property
    def index(self) -> int:
        """The index of this rank among those of its node."""
        return self._place[self.rank][1]

    def node_of(self, rank: int) -> int:
        """The number of a rank's node."""
        return self._place[rank][0]

    def partner(self, rank: int, node: int) -> int:
        """The rank of ``node`` that exchanges messages with ``rank``; on its own node that is the rank itself."""
        ranks = self.nodes[node]
        return ranks[self._place[rank][1] % len(ranks)]

    def holdings(self, ranks: Sequence[int], node: int) -> list[list[int]]:
        """Those of ``ranks`` whose data each rank of ``node`` holds for the node, by index: itself and others."""
        held: list[list[int]] = [[] for _ in self.nodes[node]]
        for rank in ranks:
            held[self._place[self.partner(rank, node)][1]].append(rank)
        return held

    def most_held(self, ranks: Sequence[int]) -> int:
        """The largest number of these ranks whose data one rank of any node holds."""
        return max(len(held) for node in range(len(self.nodes)) for held in self.holdings(ranks, node))
