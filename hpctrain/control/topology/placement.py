"""Orders hosts in a ring: by the least load on any link, then by the fewest crossings between leaves and between ever
larger subtrees.

A depth-first order over the switch tree enters and leaves each subtree once, which is the minimum of a ring at every
level, and with one adapter per host no link then carries more than one flow. A search can improve on it only where
several adapters of a host share a leaf, where real tables send flows over the same cable, or where links are slow.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from hpctrain.common.errors import HpctrainError
from hpctrain.control.topology.fabric import Fabric, Floats, Ints
from hpctrain.control.topology.levels import subtrees_of
from hpctrain.control.topology.names import natural_key
from hpctrain.control.topology.routes import Routes, predict_allreduce, rail_rings

# The changes that the search tries: enough to converge on small fabrics, and under a second on 2,048 hosts.
TRIES = 1000

# Loads are sums of fractions: those closer than this are equal.
_ALIKE = 1e-9

# Positions in the list of hosts given, or a property of each.
Order = NDArray[np.intp]


@dataclass(frozen=True, kw_only=True)
class Placement:
    """A closed ring over hosts, one ring per rail in the same order.

    Attributes:
        order: the host numbers in the order of the ring.
        crossings_by_level: from the leaves up, the number of neighbours that are in different subtrees of that level
            on some rail. Levels that divide the hosts as the level below does, or not at all, are left out.
        worst_load: flows that share the most loaded link, in shares of an adapter's bandwidth: one flow on a link of
            half that bandwidth is 2.
        bandwidth_bytes_per_s: bytes of a large buffer that an all-reduce finishes a second; None where the fabric has
            no speeds, or for one host.
    """

    order: tuple[int, ...]
    crossings_by_level: tuple[int, ...]
    worst_load: float
    bandwidth_bytes_per_s: float | None

    @property
    def crossings(self) -> int:
        """The number of neighbours on different leaves."""
        return self.crossings_by_level[0]


@dataclass(frozen=True, kw_only=True)
class PlacementReport:
    """The order given, by name, depth-first over the switch tree, and placed.

    Attributes:
        bound_by_level: the lower bound of the crossings of any order: the number of groups of hosts on the same
            subtrees, if several. A depth-first order over the tree reaches all bounds.
        rails: the adapters of each host that are used: one on each rail that all hosts have.
        short: names of hosts with fewer adapters than other hosts of the ring, in the order given.
        already_optimal: whether the given order is as good as the placed one in every respect.
    """

    given: Placement
    name: Placement
    tree: Placement
    placed: Placement
    bound_by_level: tuple[int, ...]
    rails: int
    short: tuple[str, ...]
    already_optimal: bool

    @property
    def bound(self) -> int:
        """The lower bound of the crossings of leaves."""
        return self.bound_by_level[0]


def report(fabric: Fabric, given: Sequence[int], *, seed: int = 0) -> PlacementReport:
    """Places hosts and compares the orders.

    Args:
        given: host numbers in the user's order, at least one.

    Raises:
        HpctrainError: a host named twice or without an adapter, or hosts that no path joins.
    """
    rings = Rings(fabric, given)
    as_given = np.arange(len(given))
    by_name = np.array(sorted(range(len(given)), key=lambda host: natural_key(fabric.hosts[given[host]])))
    tree = np.lexsort((np.argsort(by_name), *rings.groups))
    # min takes the first of equals, so that the user's order stays where no other is better.
    best = min([as_given, search(rings, tree, seed=seed), tree, by_name], key=rings.cost)
    orders: dict[str, Order] = {"given": as_given, "name": by_name, "tree": tree, "placed": best}
    measured = {name: rings.measure(order) for name, order in orders.items()}
    return PlacementReport(
        **measured,
        bound_by_level=rings.bounds,
        rails=rings.adapters.shape[1],
        short=rings.short,
        already_optimal=rings.cost(as_given) <= rings.cost(best),
    )


class Rings:
    """The cost of orders of these hosts. Orders are permutations of positions in the list of hosts given.

    Attributes:
        adapters: (hosts, rails): each host's adapter on each rail that all hosts have.
        short: names of the hosts that have fewer adapters than others.
        groups: from the leaves up, the group of each host: equal numbers for hosts on the same subtrees of that level
            on every rail. The last level is one group of all hosts.
        bounds: per level but the last, the lower bound of the crossings of any order.
        taken: the fabric's links by the numbers that paths use.
    """

    def __init__(self, fabric: Fabric, hosts: Sequence[int]) -> None:
        owned = [fabric.adapters(host) for host in hosts]
        _check(fabric, hosts, owned)
        self.fabric, self.hosts = fabric, hosts
        self.routes = Routes(fabric)
        self.adapters = rail_adapters(fabric, hosts)
        most = max(len(adapters) for adapters in owned)
        self.short = tuple(
            fabric.hosts[host] for host, adapters in zip(hosts, owned, strict=True) if len(adapters) < most
        )
        self.groups = _groups(fabric, self.adapters)
        counts = [int(group.max()) + 1 for group in self.groups[:-1]]
        self.bounds = tuple(count if count > 1 else 0 for count in counts)
        cables = np.isin(fabric.source, self.adapters)
        self._unit = fabric.bandwidth[cables].max(initial=0.0)
        # Links are numbered as paths first use them, because a job uses few of a fabric's links.
        self._number = np.full(len(fabric.source), -1, np.int32)
        self.taken = np.empty(0, np.int32)

    def links(self, hosts: Order, following: Order) -> list[Ints]:
        """The links from each host to the one that follows it, over all rails."""
        rails = self.adapters.shape[1]
        paths = self.routes.paths(self.adapters[hosts].ravel(), self.adapters[following].ravel())
        new = np.unique(paths.link[self._number[paths.link] < 0])
        self._number[new] = np.arange(len(self.taken), len(self.taken) + len(new))
        self.taken = np.concatenate([self.taken, new])
        number = self._number[paths.link]
        return [number[begin:end] for begin, end in pairwise(paths.start[::rails])]

    def load(self, links: Sequence[Ints]) -> Floats:
        """The load of each link used by any path so far, in shares of an adapter's bandwidth."""
        count = np.bincount(np.concatenate([np.empty(0, np.int32), *links]), minlength=len(self.taken))
        load: Floats = count * (self._unit / self.fabric.bandwidth[self.taken])
        return load

    def crossings(self, order: Order) -> tuple[int, ...]:
        """The crossings at each level but the last."""
        return tuple(int((group[order] != np.roll(group[order], -1)).sum()) for group in self.groups[:-1])

    def cost(self, order: Order) -> tuple[float, tuple[int, ...]]:
        """The cost to minimise: the worst load, then the crossings."""
        return _worst(self.load(self.links(order, np.roll(order, -1))))[0], self.crossings(order)

    def measure(self, order: Order) -> Placement:
        seconds = predict_allreduce(self.routes, rail_rings(self.adapters[order]), 1.0)
        known = seconds > 0 and self.fabric.has_speeds
        worst_load, crossings = self.cost(order)
        return Placement(
            order=tuple(int(self.hosts[position]) for position in order),
            crossings_by_level=crossings,
            worst_load=worst_load,
            bandwidth_bytes_per_s=1 / seconds if known else None,
        )


def search(rings: Rings, order: Order, *, seed: int) -> Order:
    """Local search for a smaller worst load, then for fewer links with it.

    Swaps two subtrees, or two hosts, under the same switches, so that every subtree stays one run. One of the two sends
    or receives over a link with the worst load.
    """
    choose = np.random.default_rng(seed)
    following = _following(order)
    links = rings.links(np.arange(len(order)), following)
    load = rings.load(links)
    # The adapters' own cables carry the same load in every order, below which no order can be.
    least = _worst(load[np.isin(rings.fabric.source[rings.taken], rings.adapters)])[0]
    for _ in range(TRIES):
        if _worst(load)[0] <= least:
            break
        hot = load[np.concatenate(links)] > load.max() - _ALIKE
        # The hosts that send over a link with the worst load.
        senders = np.unique(np.repeat(np.arange(len(links)), list(map(len, links)))[hot])
        changed = _swap(order, rings.groups, int(choose.choice(senders)), choose)
        then = _following(changed)
        moved = np.flatnonzero(then != following)
        replaced = rings.links(moved, then[moved])
        new = rings.load(replaced) - rings.load([links[host] for host in moved])
        # Links that no path took before are at the end.
        new[: len(load)] += load
        if _worst(new) <= _worst(load):
            order, following, load = changed, then, new
            for host, taken in zip(moved, replaced, strict=True):
                links[host] = taken
    return order


def _following(order: Order) -> Order:
    """The next host of each host."""
    following = np.empty_like(order)
    following[order] = np.roll(order, -1)
    return following


def _worst(load: Floats) -> tuple[float, int]:
    """The worst load of any link, and the number of links that carry it."""
    worst = load.max(initial=0.0)
    return round(float(worst), 9), int((load > worst - _ALIKE).sum())


def _swap(order: Order, groups: list[Order], host: int, choose: np.random.Generator) -> Order:
    """The order with two runs exchanged: one that ends in ``host`` or begins after it, and a sibling, at any level."""
    position = (int(np.flatnonzero(order == host)[0]) + int(choose.integers(2))) % len(order)
    levels = [np.arange(len(order)), *groups]
    height = int(choose.integers(len(groups)))
    run, parent = levels[height][order], levels[height + 1][order]
    starts = np.flatnonzero(np.concatenate([[True], run[1:] != run[:-1]]))
    siblings = starts[(parent[starts] == parent[position]) & (run[starts] != run[position])]
    if not siblings.size:
        return order
    ends = dict(zip(starts, [*starts[1:], len(order)], strict=True))
    mine = starts[np.searchsorted(starts, position, side="right") - 1]
    first, second = sorted([mine, choose.choice(siblings)])
    parts = [
        order[:first],
        order[second : ends[second]],
        order[ends[first] : second],
        order[first : ends[first]],
        order[ends[second] :],
    ]
    return np.concatenate(parts)


def _groups(fabric: Fabric, adapters: Ints) -> list[Order]:
    """The group of each host, in the order of the switches: for the leaves, then for each level that joins groups."""
    groups: list[Order] = []
    for subtree in subtrees_of(fabric, adapters):
        group = np.unique(subtree, axis=0, return_inverse=True)[1].reshape(-1)
        if not groups or 0 < group.max() < groups[-1].max():
            groups.append(group)
    return [*groups, np.zeros(len(adapters), np.intp)]


def rail_adapters(fabric: Fabric, hosts: Sequence[int]) -> Ints:
    """For each host the adapter on each rail that all hosts have, (hosts, rails).

    A position among the host's adapters would shift if one is lost. So a host's adapters are matched by their switches
    to those of the host with most adapters on the same switches, whose adapters are numbered by rail: by their subnets
    where the rails are separate planes, else in the order of their names. Where the hosts have no common rail, adapters
    are taken in the order of their names.
    """
    by_host = np.argsort(fabric.host, kind="stable")
    bounds = np.searchsorted(fabric.host[by_host], np.arange(len(fabric.hosts) + 1))
    cables = fabric.level[fabric.source] == 0
    switch = np.full(len(fabric.names), -1, np.int32)
    switch[fabric.source[cables]] = fabric.target[cables]

    def adapters(host: int) -> list[int]:
        numbers: list[int] = by_host[bounds[host] : bounds[host + 1]].tolist()
        return numbers

    def on(host: int) -> tuple[int, ...]:
        return tuple(switch[adapters(host)].tolist())

    whole = fabric.subnet[adapters(int(np.diff(bounds).argmax()))].tolist()
    first = {on(host)[0] for host in hosts}
    beside = np.unique(fabric.host[(fabric.host >= 0) & np.isin(switch, list(first))]).tolist()
    # The host with most adapters comes first, so that the search for a pattern finds it.
    beside.sort(key=lambda host: int(bounds[host] - bounds[host + 1]))
    patterns: dict[int, dict[tuple[int, ...], int]] = defaultdict(dict)
    for host in beside:
        pattern = on(host)
        for each in first.intersection(pattern):
            patterns[each].setdefault(pattern, host)

    def on_rails(host: int) -> dict[int, int]:
        """The adapter on each rail."""
        own = on(host)
        pattern, other = next(
            (pattern, other) for pattern, other in patterns[own[0]].items() if Counter(own) <= Counter(pattern)
        )
        rails = _match(fabric.subnet[adapters(other)].tolist(), whole)
        return {rails[place]: adapter for place, adapter in zip(_match(own, pattern), adapters(host), strict=True)}

    by_host_rails = [on_rails(host) for host in hosts]
    common = sorted(set.intersection(*(set(rails) for rails in by_host_rails)))
    if common:
        return np.array([[rails[rail] for rail in common] for rails in by_host_rails], np.int32)
    fewest = min(len(adapters(host)) for host in hosts)
    return np.array([adapters(host)[:fewest] for host in hosts], np.int32)


def _match(keys: Sequence[int], pattern: Sequence[int]) -> list[int]:
    """Each key's place in the pattern, equal keys in turn; 0, 1, … where the pattern lacks a key."""
    places: dict[int, list[int]] = defaultdict(list)
    for place, key in enumerate(pattern):
        places[key].append(place)
    if Counter(keys) <= Counter(pattern):
        return [places[key].pop(0) for key in keys]
    return list(range(len(keys)))


def _check(fabric: Fabric, hosts: Sequence[int], owned: Sequence[Ints]) -> None:
    twice = [fabric.hosts[host] for host, count in Counter(hosts).items() if count > 1]
    if twice:
        raise HpctrainError(
            "HT-placement-host-twice",
            "{host} is listed twice among the hosts",
            "name each host once; ranks share it by its slots",
            host=twice[0],
        )
    bare = [fabric.hosts[host] for host, adapters in zip(hosts, owned, strict=True) if not adapters.size]
    if bare:
        raise HpctrainError(
            "HT-not-in-fabric",
            "{host} has no adapter in the fabric",
            "leave it out, or read a listing that has it",
            host=bare[0],
        )
