"""The order of hosts in a ring: fewest crossings between leaves, then the least load on any link.

A depth-first order over the switch tree leaves and enters each subtree once, which is the least that a ring can do,
and with one adapter a host no link then carries more than one flow. Only where several adapters of a host share a leaf,
where real tables send flows over the same cable, or where links are slow, is there anything left for a search to gain.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from hpctrain.errors import HpctrainError
from hpctrain.topology.fabric import Fabric, Floats, Ints
from hpctrain.topology.names import natural
from hpctrain.topology.rails import rail_adapters
from hpctrain.topology.routes import Routes
from hpctrain.topology.traffic import predict_allreduce, rail_rings

# Tried changes of the order: enough to settle small fabrics, and under a second on 2,048 hosts.
TRIES = 1000

# Positions in the list of hosts given, or a property of each.
Order = NDArray[np.intp]


@dataclass(frozen=True, kw_only=True)
class Placement:
    """A closed ring over hosts, one ring a rail in the same order.

    Attributes:
        order: host numbers.
        crossings: neighbours whose sets of leaves differ.
        worst_load: flows that share the most loaded link, in shares of an adapter's bandwidth: one flow on a link of
            half that bandwidth is 2.
        bandwidth_bytes_per_s: bytes of a large buffer that an all-reduce finishes a second; None where the fabric has
            no speeds, or for one host.
    """

    order: tuple[int, ...]
    crossings: int
    worst_load: float
    bandwidth_bytes_per_s: float | None


@dataclass(frozen=True, kw_only=True)
class PlacementReport:
    """The order given, by name, depth-first over the switch tree, and placed.

    Attributes:
        bound: crossings that no order can be under: the number of groups of hosts with equal leaves, if several.
        rails: adapters of each host that take part: one on each rail that all hosts have.
        short: names of hosts with fewer adapters than others here have, in the order given.
        already_optimal: the given order is not worse than the placed one in anything.
    """

    given: Placement
    name: Placement
    tree: Placement
    placed: Placement
    bound: int
    rails: int
    short: tuple[str, ...]
    already_optimal: bool


def place(fabric: Fabric, hosts: Sequence[int], *, seed: int = 0) -> Placement:
    """The best order found: never a worse worst load than the order given, sorted names or depth-first.

    Raises:
        HpctrainError: as of ``report``.
    """
    return report(fabric, hosts, seed=seed).placed


def report(fabric: Fabric, given: Sequence[int], *, seed: int = 0) -> PlacementReport:
    """Places hosts and compares the orders.

    Args:
        given: host numbers in the user's order.
        seed: of the local search.

    Raises:
        HpctrainError: no host, one named twice or without an adapter, or hosts that no path joins.
    """
    rings = Rings(fabric, given)
    as_given = np.arange(len(given))
    by_name = np.array(sorted(range(len(given)), key=lambda host: natural(fabric.hosts[given[host]])))
    tree = np.lexsort((np.argsort(by_name), *rings.groups))
    found = min([search(rings, tree, seed=seed), tree, as_given, by_name], key=rings.cost)
    orders: dict[str, Order] = {"given": as_given, "name": by_name, "tree": tree, "placed": found}
    measured = {name: rings.measure(order) for name, order in orders.items()}
    return PlacementReport(
        **measured,
        bound=rings.bound,
        rails=rings.adapters.shape[1],
        short=rings.short,
        already_optimal=rings.cost(as_given) <= rings.cost(found),
    )


class Rings:
    """What an order of these hosts costs. Orders are permutations of positions in the list of hosts given.

    Attributes:
        adapters: (hosts, rails): of each host the adapter on each rail that all hosts have.
        short: names of the hosts that have fewer adapters than others.
        groups: from the leaves up, the group of each host: equal numbers where the hosts hang on the same subtrees of
            that level. The last is one group of all.
        bound: the least crossings of any order.
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
        self.groups = _groups(fabric, hosts)
        leaf_groups = len(np.unique(self.groups[0]))
        self.bound = leaf_groups if leaf_groups > 1 else 0
        cables = np.isin(fabric.source, self.adapters)
        # A link's share of one flow, with an adapter's bandwidth as the unit.
        self.share: Floats = fabric.bandwidth[cables].max(initial=0.0) / fabric.bandwidth

    def links(self, hosts: Order, following: Order) -> list[Ints]:
        """The links that each host takes to the one that follows it, over all rails."""
        paths = self.routes.paths(self.adapters[hosts].ravel(), self.adapters[following].ravel())
        return [paths.link[begin:end] for begin, end in pairwise(paths.start[:: self.adapters.shape[1]])]

    def loads(self, links: Sequence[Ints]) -> Floats:
        """Of each link of the fabric, in shares of an adapter's bandwidth."""
        taken = np.concatenate([np.empty(0, np.int32), *links])
        return self.share * np.bincount(taken, minlength=len(self.share)).astype(np.float64)

    def crossings(self, order: Order) -> int:
        group = self.groups[0][order]
        return int((group != np.roll(group, -1)).sum())

    def cost(self, order: Order) -> tuple[float, int]:
        loads = self.loads(self.links(order, np.roll(order, -1)))
        return round(float(loads.max(initial=0.0)), 9), self.crossings(order)

    def measure(self, order: Order) -> Placement:
        seconds = predict_allreduce(self.routes, rail_rings(self.adapters[order]), 1.0)
        known = seconds > 0 and self.fabric.has_speeds
        worst_load, crossings = self.cost(order)
        return Placement(
            order=tuple(int(self.hosts[position]) for position in order),
            crossings=crossings,
            worst_load=worst_load,
            bandwidth_bytes_per_s=1 / seconds if known else None,
        )


def search(rings: Rings, order: Order, *, seed: int) -> Order:
    """Local search for a smaller worst load, then for fewer links that bear it.

    Swaps two subtrees, or two hosts, under the same switches, so that every subtree stays one run. One of the two sends
    or receives over a link with the worst load.
    """
    choose = np.random.default_rng(seed)
    following = _following(order)
    links = rings.links(np.arange(len(order)), following)
    loads = rings.loads(links)
    # What the adapters' own cables carry is the same in every order.
    least, _ = _worst(loads[np.isin(rings.fabric.source, rings.adapters)])
    for _ in range(TRIES):
        worst = _worst(loads)
        if worst[0] <= least:
            break
        changed = _swap(order, rings.groups, int(choose.choice(_bearers(links, loads))), choose)
        then = _following(changed)
        moved = np.flatnonzero(then != following)
        replaced = rings.links(moved, then[moved])
        new = loads + rings.loads(replaced) - rings.loads([links[host] for host in moved])
        if _worst(new) <= worst:
            order, following, loads = changed, then, new
            for host, taken in zip(moved, replaced, strict=True):
                links[host] = taken
    return order


def _following(order: Order) -> Order:
    """Of each host, the one after it."""
    following = np.empty_like(order)
    following[order] = np.roll(order, -1)
    return following


def _worst(loads: Floats) -> tuple[float, int]:
    worst = loads.max(initial=0.0)
    return round(float(worst), 9), int((loads > worst - 1e-9).sum())


def _bearers(links: list[Ints], loads: Floats) -> Order:
    """The hosts that send over a link with the worst load."""
    lengths = [len(taken) for taken in links]
    hot = loads[np.concatenate(links)] > loads.max() - 1e-9
    return np.unique(np.repeat(np.arange(len(links)), lengths)[hot])


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


def _groups(fabric: Fabric, hosts: Sequence[int]) -> list[Order]:
    """Of each level from the leaves up: the number of each host's group, ordered as the switches are.

    A subtree of level ``h`` is what hangs together without the switches above ``h``, so that a missing cable does not
    split it. A host belongs to the set of subtrees that its adapters hang on.
    """
    groups = []
    subtree = np.arange(len(fabric.names))
    for height in range(1, int(fabric.level.max()) + 1):
        if height > 1:
            subtree = _joined(fabric, height)
        sets = [tuple(np.unique(subtree[list(fabric.leaves[host])]).tolist()) for host in hosts]
        number = {subtrees: place for place, subtrees in enumerate(sorted(set(sets)))}
        groups.append(np.array([number[subtrees] for subtrees in sets]))
    return [*groups, np.zeros(len(hosts), np.intp)]


def _joined(fabric: Fabric, height: int) -> Order:
    """Of each switch: the lowest number of those that it hangs together with through levels up to ``height``."""
    label = np.arange(len(fabric.names))
    level = fabric.level
    cables = (np.minimum(level[fabric.source], level[fabric.target]) > 0) & (
        np.maximum(level[fabric.source], level[fabric.target]) <= height
    )
    source, target = fabric.source[cables], fabric.target[cables]
    while (label[source] != label[target]).any():
        np.minimum.at(label, target, label[source])
    return label


def _check(fabric: Fabric, hosts: Sequence[int], owned: Sequence[Ints]) -> None:
    if not hosts:
        raise HpctrainError("no hosts to place", "name at least one, such as --hosts gpu[001-032]")
    twice = [fabric.hosts[host] for host, count in Counter(hosts).items() if count > 1]
    if twice:
        raise HpctrainError(f"{twice[0]} is among the hosts twice", "name each host once; ranks share it by its slots")
    bare = [fabric.hosts[host] for host, adapters in zip(hosts, owned, strict=True) if not adapters.size]
    if bare:
        raise HpctrainError(f"{bare[0]} has no adapter in the fabric", "leave it out, or read a listing that has it")
