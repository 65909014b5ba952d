"""Where the ranks of a group lie, and which of them pass on what travels between nodes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class Places:
    """The ranks of a group by node, seen from one of them.

    What a node sends or gets is divided among its ranks by their place in it, so that all of them drive the network,
    and each byte comes to a node once.

    Attributes:
        rank: this one, in the group.
        nodes: the ranks of each node, in the order of their ranks; nodes in the order of their first rank.
    """

    rank: int
    nodes: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, rank: int, homes: Sequence[int]) -> Places:
        """``homes``: the first rank of each rank's node, by rank."""
        firsts = dict.fromkeys(homes)
        return cls(rank, tuple(tuple(r for r, home in enumerate(homes) if home == first) for first in firsts))

    @cached_property
    def size(self) -> int:
        """How many ranks there are."""
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
        """The place of this rank among those of its node."""
        return self._place[self.rank][1]

    def node_of(self, rank: int) -> int:
        """The number of a rank's node."""
        return self._place[rank][0]

    def partner(self, rank: int, node: int) -> int:
        """Which rank of a node deals with a rank of any other; a rank deals with itself on its own."""
        ranks = self.nodes[node]
        return ranks[self._place[rank][1] % len(ranks)]

    def holdings(self, ranks: Sequence[int], node: int) -> list[list[int]]:
        """Whose data each rank of a node holds for all of it, by place: its own, and those it gets from others.

        Args:
            ranks: that have any.
            node: its number.
        """
        held: list[list[int]] = [[] for _ in self.nodes[node]]
        for rank in ranks:
            held[self._place[self.partner(rank, node)][1]].append(rank)
        return held

    def most_held(self, ranks: Sequence[int]) -> int:
        """How many of these ranks' data a rank of any node holds at most."""
        return max(len(held) for node in range(len(self.nodes)) for held in self.holdings(ranks, node))
