"""Levels, crossings and bounds, against brute force over the cables of 1,000 random fabrics."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass, field

import networkx as nx
import numpy as np
import pytest

from hpctrain.control.topology import placement
from hpctrain.control.topology.build import build_fabric
from hpctrain.control.topology.fabric import Fabric
from hpctrain.control.topology.placement import report
from hpctrain.control.topology.readers import ibnetdiscover
from support.topology.listings import listing


@dataclass
class Cables:
    """Cables of one fabric while it grows.

    Attributes:
        laid: (end, end) as of ``listings.listing``.
        level: of each switch, as it was built.
    """

    choose: random.Random
    rails: int
    laid: list[tuple[str, str]] = field(default_factory=list)
    level: dict[str, int] = field(default_factory=dict)
    hosts: int = 0

    def switches(self, level: int, count: int) -> list[str]:
        names = [f"s{len(self.level) + number}" for number in range(count)]
        # Names say nothing of the place in the tree.
        self.level |= dict.fromkeys(names, level)
        return names

    def leaf_set(self) -> list[str]:
        """A leaf a rail with hosts on all of them; one but the first may have lost its adapter on the last rail."""
        leaves = self.switches(1, self.rails)
        for number in range(self.choose.randint(1, 3)):
            lost = number and self.rails > 1 and self.choose.random() < 0.2
            here = leaves[:-1] if lost else leaves
            self.laid += [(f"h{self.hosts} m{rail}", leaf) for rail, leaf in enumerate(here)]
            self.hosts += 1
        return leaves

    def join(self, lower: list[str], upper: list[str], missing: float) -> None:
        """A cable of each to each, often several; of those to one switch below, all but one may be missing."""
        for below in lower:
            kept = self.choose.choice(upper)
            for above in upper:
                if above == kept or self.choose.random() >= missing:
                    self.laid += [(below, above)] * self.choose.choice([1, 1, 2])

    def tree(self, level: int, missing: float, *, root: bool = True) -> list[str]:
        """The switches on top of a tree whose deepest leaves are ``level`` - 1 below; others hang anywhere."""
        if level == 1:
            return self.leaf_set()
        # Two of the full height below the root, or another switch would be the middle.
        heights = [level - 1] * (2 if root else 1)
        heights += [self.choose.randint(1, level - 1) for _ in range(self.choose.randint(0, 2))]
        tops = self.switches(level, self.choose.choice([1, 1, 2, 3]))
        for height in heights:
            self.join(self.tree(height, missing, root=False), tops, missing)
        return tops


def ragged(seed: int, missing: float = 0.0) -> Cables:
    """A tree with several roots, whose leaves hang at any height."""
    cables = Cables(random.Random(seed), rails=1 + seed % 2)
    cables.tree(cables.choose.choice([2, 3, 3, 4]), missing)
    return cables


def flat(seed: int) -> Cables:
    """Leaves alone, cabled to each other."""
    cables = Cables(random.Random(seed), rails=1)
    leaves = [cables.leaf_set()[0] for _ in range(cables.choose.randint(1, 6))]
    for number, leaf in enumerate(leaves[1:], start=1):
        for other in cables.choose.sample(leaves[:number], cables.choose.randint(1, min(2, number))):
            cables.laid.append((leaf, other))
    return cables


def anything(seed: int) -> Cables:
    """A ragged fabric that lost cables and got others, with spare switches and with hosts on some upper switch."""
    cables = ragged(seed, missing=0.3)
    known = list(cables.level)
    for _ in range(cables.choose.randint(0, 2)):
        cables.laid.append(tuple(cables.choose.sample(known, 2)))  # type: ignore[arg-type]
    for _ in range(cables.choose.randint(0, 2)):
        spare = cables.switches(0, 1)
        cables.join(spare, cables.choose.sample(known, cables.choose.randint(1, min(2, len(known)))), 0.0)
    if cables.choose.random() < 0.3:
        # On an upper switch, so that nothing says that it is on another rail than the first.
        upper = [switch for switch in known if cables.level[switch] > 1]
        cables.laid.append((f"h{cables.hosts} m0", cables.choose.choice(upper)))
    return cables


def kinds(seeds: range) -> Iterator[tuple[int, Cables]]:
    """A fabric a seed, of each kind in turn."""
    for seed in seeds:
        yield seed, (ragged, flat, anything, anything)[seed % 4](seed)


def built(cables: Cables) -> Fabric:
    return build_fabric(ibnetdiscover.read(listing(cables.laid), "random"))


def switch_levels(fabric: Fabric) -> dict[str, int]:
    return {name: int(level) for name, level in zip(fabric.names, fabric.level, strict=True) if " " not in name}


class Brute:
    """What the cables say, by searches of the whole graph."""

    def __init__(self, laid: list[tuple[str, str]]) -> None:
        cables = nx.Graph(laid)
        self.adapters = {name: next(iter(cables[name])) for name in cables if " " in name}
        self.graph = cables.subgraph(name for name in cables if " " not in name)
        self.leaves = {switch for switch in self.adapters.values() if switch in self.graph}
        self.levels = self._levels()

    def _joining(self) -> set[str]:
        """Leaves that alone join parts of switches without hosts, each of which joins leaves."""
        parts = nx.Graph()
        for part in nx.connected_components(self.graph.subgraph(set(self.graph) - self.leaves)):
            beside = nx.node_boundary(self.graph, part)
            if len(beside) > 1:
                parts.add_edges_from((frozenset(part), leaf) for leaf in beside)
        count = nx.number_connected_components(parts)
        return {
            leaf
            for leaf in self.leaves & set(parts)
            if nx.number_connected_components(parts.subgraph(set(parts) - {leaf})) > count
        }

    def _heights(self, passing: set[str]) -> dict[str, int]:
        heights = {switch: int(switch in self.leaves) for switch in self.graph}
        climbing = nx.Graph((one, other) for one, other in self.graph.edges if {one, other} & passing)
        away = {}
        for leaf in self.leaves & set(climbing):
            ways = nx.DiGraph((one, other) for one in passing | {leaf} for other in climbing[one])
            away[leaf] = nx.single_source_shortest_path_length(ways, leaf)
        for one, other in itertools.combinations(away, 2):
            for switch in passing & away[one].keys() & away[other].keys() - {one, other}:
                if away[one][switch] + away[other][switch] == away[one].get(other):
                    heights[switch] = max(heights[switch], 1 + min(away[one][switch], away[other][switch]))
        return heights

    def _levels(self) -> dict[str, int]:
        passing = set(self.graph) - self.leaves | self._joining()
        heights = self._heights(passing)

        def below(switch: str) -> set[str]:
            cabled = {each for each in self.graph[switch] if each in passing or switch in passing}
            return {each for each in cabled if 0 < heights[each] < heights[switch]}

        def is_above(one: str, other: str) -> bool:
            if heights[one] != heights[other] or heights[one] < 2:
                return heights[one] > heights[other] > 0
            single, several = below(one), below(other)
            return len(single) == 1 < len(several) and not single & several

        def rank(switch: str) -> float:
            lifted = any(is_above(switch, other) for other in self.graph[switch] if heights[other] == heights[switch])
            return heights[switch] + (0.5 if lifted else 0)

        levels: dict[str, int] = {}
        for switch in sorted(self.graph, key=rank):
            lower = [levels[each] for each in self.graph[switch] if 0 < rank(each) < rank(switch)]
            levels[switch] = -1 if not heights[switch] else 1 if rank(switch) == 1 else 1 + max([1, *lower])
        return levels

    def steps(self) -> Iterator[nx.Graph]:
        """The switches joined up to each level: by switches below, then by cables between equals as well."""
        level = self.levels
        for top, equals in itertools.product(range(1, max(level.values(), default=0) + 1), (False, True)):
            joined = nx.Graph()
            joined.add_nodes_from(switch for switch in self.graph if 1 <= level[switch] <= top)
            joined.add_edges_from(
                (one, other)
                for one, other in self.graph.edges
                if {one, other} <= set(joined) and (equals or level[one] != level[other] or level[one] < top)
            )
            yield joined


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize(
    "first", [0, *(pytest.param(first, marks=pytest.mark.thorough) for first in range(100, 1000, 100))]
)
def test_random_fabrics(first: int, monkeypatch: pytest.MonkeyPatch) -> None:
    # The search for a smaller load is another test's.
    monkeypatch.setattr(placement, "TRIES", 3)
    for seed, cables in kinds(range(first, first + 100)):
        fabric, brute = built(cables), Brute(cables.laid)
        assert switch_levels(fabric) == brute.levels, seed
        against_every_ring(fabric, brute, cables.choose.sample(fabric.hosts, min(6, len(fabric.hosts))), seed)


def against_every_ring(fabric: Fabric, brute: Brute, names: list[str], seed: int) -> None:
    """No order of the job has fewer crossings at any level than its bound, and those reported are the real ones."""
    found = report(fabric, [fabric.hosts.index(name) for name in names])
    owned = [{name.split()[1] for name in brute.adapters if name.split()[0] == host} for host in names]
    parted = list(apart(brute, names, sorted(set.intersection(*owned))))
    rings = np.array([(0, *rest) for rest in itertools.permutations(range(1, len(names)))])
    assert found.bound_by_level == tuple(int(crossings(matrix, rings).min()) for matrix in parted), seed
    worth = []
    for order in (found.given, found.name, found.tree, found.placed):
        ring = np.array([[names.index(fabric.hosts[host]) for host in order.order]])
        assert order.crossings_by_level == tuple(int(crossings(matrix, ring)[0]) for matrix in parted), seed
        worth.append((order.worst_load, order.crossings_by_level))
    assert found.tree.crossings_by_level == found.bound_by_level, seed
    assert worth[-1] == min(worth), "the least load, then the fewest crossings at the lowest level that differs"
    assert found.already_optimal == (worth[0] == worth[-1])


def crossings(parted: np.ndarray, rings: np.ndarray) -> np.ndarray:
    return parted[rings, np.roll(rings, -1, axis=1)].sum(axis=1)


def apart(brute: Brute, hosts: list[str], rails: list[str]) -> Iterator[np.ndarray]:
    """Which hosts some rail joins only above a level; levels that part the hosts no further left out."""
    switches = [[brute.adapters[f"{host} {rail}"] for rail in rails] for host in hosts]
    groups = len(hosts) + 1
    for number, joined in enumerate(brute.steps()):
        part = {switch: place for place, each in enumerate(nx.connected_components(joined)) for switch in each}
        # Of hosts on a switch above the level, only the switch itself.
        on = [tuple(part.get(switch, switch) for switch in each) for each in switches]
        if number == 0 or 1 < len(set(on)) < groups:
            groups = len(set(on))
            yield np.array([[one != other for other in on] for one in on])


@pytest.mark.parametrize("first", range(0, 200, 100))
def test_a_ragged_tree_has_the_levels_that_it_was_built_with(first: int) -> None:
    for seed in range(first, first + 100):
        cables = ragged(seed)
        assert switch_levels(built(cables)) == cables.level, seed
