"""Lays a mesh over a fabric: chooses the host of each part, and counts the traffic that crosses leaves. Pure.

Ranks are numbered with tp innermost and fill one host after the other, so the order of the hosts alone decides which
axes stay within a leaf. The axis with the most traffic depends on the model, so all orders are tried that keep one axis
after the other together along the tree of the switches.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, permutations
from operator import mul

import numpy as np

from hpctrain.common.recipes.mesh import AXES, Axis, Mesh
from hpctrain.common.recipes.mesh_traffic import AxisTraffic, LaidMesh, MeshTraffic, MeshWork
from hpctrain.control.topology.fabric import Fabric, Floats
from hpctrain.control.topology.levels import subtrees_of
from hpctrain.control.topology.mesh_flows import MeshFlows, mesh_flows
from hpctrain.control.topology.placement import Order, Rings

TORCH: tuple[Axis, ...] = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
"""torchtitan's order of axes, outermost first (torchtitan, torchtitan/distributed/parallel_dims.py)."""


@dataclass(frozen=True, kw_only=True)
class Laid:
    """Hosts with a mesh over them.

    Attributes:
        order: the host numbers, in the order of the ranks.
        crossings: the times that a ring over the hosts in this order changes leaves.
    """

    order: tuple[int, ...]
    crossings: int
    traffic: MeshTraffic


def lay(fabric: Fabric, given: Sequence[int], placed: Sequence[int], slots: Mapping[int, int], work: MeshWork) -> Laid:
    """The order of hosts in which the mesh sends the fewest bytes across leaves, and its traffic in that order.

    Args:
        given: host numbers in the user's order.
        placed: the same hosts in the order of :func:`hpctrain.control.topology.placement.report`.
        slots: the ranks of each host, which add up to those of ``work``.
        work: the mesh and its model; where the model is not known, the order is ``placed``.

    Raises:
        HpctrainError: a host without an adapter, or hosts that no path joins.
    """
    rings = Rings(fabric, given)
    layout = MeshLayout(rings, work.mesh, mesh_flows(work), [slots[host] for host in given])
    as_given = np.arange(len(given))
    at = {host: position for position, host in enumerate(given)}
    by_leaf = np.array([at[host] for host in placed])
    best = by_leaf if work.model is None else layout.best([as_given, by_leaf, *layout.along_axes(by_leaf)])
    orders = {
        "laid": layout.traffic_of(best),
        "given": layout.traffic_of(as_given),
        "torch": layout.traffic_of(as_given, TORCH),
        "torch_placed": layout.traffic_of(by_leaf, TORCH),
    }
    return Laid(
        order=tuple(given[host] for host in best),
        crossings=rings.crossings(best)[0],
        traffic=MeshTraffic(in_bytes=work.model is not None, orders=orders),
    )


def in_one_node(work: MeshWork) -> MeshTraffic:
    """The traffic of a mesh whose ranks are all on one host."""
    sizes = work.mesh.sizes
    axes = tuple(
        AxisTraffic(axis=axis, ranks=sizes[axis], sent=flows.sent, levels=(float(flows.nbytes.sum()),))
        for axis, flows in mesh_flows(work).items()
    )
    laid = LaidMesh(axes=axes, busiest_link=0.0, busiest_seconds=None)
    return MeshTraffic(in_bytes=work.model is not None, orders={"laid": laid})


class MeshLayout:
    """A mesh over the hosts of ``rings``. Orders are permutations of positions in the list of hosts given.

    Args:
        mesh: the mesh from :meth:`~hpctrain.common.recipes.mesh.Mesh.at` for all ranks.
        slots: the ranks of each host, in the order given.
    """

    def __init__(self, rings: Rings, mesh: Mesh, flows: Mapping[Axis, MeshFlows], slots: Sequence[int]) -> None:
        self.rings, self.mesh, self.flows = rings, mesh, flows
        self._slots = np.array(slots)
        self._sizes = list(mesh.sizes.values())

    def best(self, orders: Iterable[Order]) -> Order:
        """The order with the fewest bytes across leaves, then across the levels above, then on the busiest link; the
        first of equals.
        """
        tried = {order.tobytes(): order for order in orders}
        costs = {key: self.cost(order) for key, order in tried.items()}
        least = min(costs.values())
        equal = [order for key, order in tried.items() if costs[key] == least]
        return min(equal, key=lambda order: float(self.load(order).max())) if len(equal) > 1 else equal[0]

    def traffic_of(self, order: Order, axes: Sequence[Axis] = AXES) -> LaidMesh:
        """The traffic by axis and level for an order of hosts.

        Args:
            axes: the order in which ranks are numbered over the mesh, outermost axis first.
        """
        hosts, rails = self.places(order, axes)
        levels = self._levels(hosts, rails)
        traffic = [
            AxisTraffic(
                axis=axis,
                ranks=self.mesh.sizes[axis],
                sent=flows.sent,
                levels=_by_level(flows.over_rails(hosts), levels),
            )
            for axis, flows in self.flows.items()
        ]
        fabric, load = self.rings.fabric, self.load(order, axes)
        busiest = int(load.argmax())
        return LaidMesh(
            axes=tuple(traffic),
            busiest_link=float(load[busiest] * fabric.bandwidth[busiest]),
            busiest_seconds=float(load[busiest]) if fabric.has_speeds else None,
        )

    def cost(self, order: Order) -> tuple[float, ...]:
        """The bytes across leaves, and across each level above."""
        hosts, rails = self.places(order)
        levels = self._levels(hosts, rails)
        sums = np.sum([_by_level(flows.over_rails(hosts), levels) for flows in self.flows.values()], axis=0)
        return tuple(float(sums[level:].sum()) for level in range(2, len(sums)))

    def load(self, order: Order, axes: Sequence[Axis] = AXES) -> Floats:
        """The seconds that each link takes for its bytes; the bytes where speeds are not known.

        Raises:
            HpctrainError: two adapters have no route.
        """
        hosts, rails = self.places(order, axes)
        routes, adapters = self.rings.routes, self.rings.adapters[hosts, rails]
        total = np.zeros(len(routes.fabric.source))
        for flows in (axis_flows.over_rails(hosts) for axis_flows in self.flows.values()):
            away = hosts[flows.source] != hosts[flows.target]
            source, target = adapters[flows.source[away]], adapters[flows.target[away]]
            total += routes.loads(source, target, flows.nbytes[away])
        seconds: Floats = total / routes.fabric.bandwidth
        return seconds

    def places(self, order: Order, axes: Sequence[Axis] = AXES) -> tuple[Order, Order]:
        """The position of each rank's host, and its rail: ranks of a host share its rails evenly."""
        at = [AXES.index(axis) for axis in axes]
        # For each rank of the mesh, its place where ranks are numbered in the order of the axes.
        place = np.arange(math.prod(self._sizes)).reshape([self._sizes[axis] for axis in at])
        place = np.moveaxis(place, range(len(at)), at).ravel()
        counts, rails = self._slots[order], self.rings.adapters.shape[1]
        host = np.repeat(order, counts)
        rail = np.concatenate([np.arange(count) * rails // count for count in counts])
        return host[place], rail[place]

    def _levels(self, hosts: Order, rails: Order) -> list[Order]:
        """Each rank's host, its leaf, and its subtree at each level above that joins some of these."""
        return [hosts, *(subtree[hosts, rails] for subtree in self._subtrees)]

    @cached_property
    def _subtrees(self) -> list[Order]:
        """The leaf of each host on each rail, and the subtrees above, (hosts, rails) each."""
        found: list[Order] = []
        for subtree in subtrees_of(self.rings.fabric, self.rings.adapters):
            if not found or len(np.unique(subtree)) < len(np.unique(found[-1])):
                found.append(subtree.astype(np.intp))
        return found

    @cached_property
    def _grid(self) -> list[int] | None:
        """The hosts along each axis; None where hosts have different numbers of ranks."""
        return host_grid(self._sizes, int(self._slots[0])) if len(set(self._slots.tolist())) == 1 else None

    def along_axes(self, placed: Order) -> Iterator[Order]:
        """Orders in which hosts that differ in one axis alone are neighbours in the fabric, for each order of the axes,
        with as many of these runs of neighbours within a leaf as it has hosts for.
        """
        grid = self._grid
        if grid is None:
            return
        wide = [axis for axis, size in enumerate(grid) if size > 1]
        for nested in permutations(wide):
            numbers = np.arange(len(placed)).reshape([grid[axis] for axis in nested])
            # Maps places along the fabric, where the last of these axes is innermost, to hosts in rank order.
            by_rank = numbers.transpose(np.argsort(nested)).ravel()
            for run in accumulate((grid[axis] for axis in reversed(nested)), mul, initial=1):
                yield whole_runs(placed, self.rings.groups[0], run)[by_rank]


def _by_level(flows: MeshFlows, levels: Sequence[Order]) -> tuple[float, ...]:
    """The bytes by the lowest level at which source and target are in the same part."""
    left = np.ones(len(flows.source), bool)
    sums = []
    for level in levels:
        together = left & (level[flows.source] == level[flows.target])
        sums.append(float(flows.nbytes[together].sum()))
        left &= ~together
    assert not left.any()
    return tuple(sums)


def host_grid(sizes: Sequence[int], slots: int) -> list[int] | None:
    """The hosts along each axis where each has ``slots`` ranks, one host filled after the other.

    None where an axis cannot be divided equally over the hosts.
    """
    left, grid = slots, []
    for size in reversed(sizes):
        if size % left and left % size:
            return None
        grid.append(max(1, size // left))
        left = max(1, left // size)
    return grid[::-1]


def whole_runs(order: Order, leaves: Order, run: int) -> Order:
    """The hosts in their order, but with those that form complete runs within a leaf first, and then the others.

    Args:
        leaves: the number of each host's leaf.
        run: the number of hosts in a run, all on one leaf.
    """
    first: list[int] = []
    rest: list[int] = []
    for leaf in dict.fromkeys(leaves[order].tolist()):
        hosts = order[leaves[order] == leaf].tolist()
        whole = len(hosts) // run * run
        first += hosts[:whole]
        rest += hosts[whole:]
    return np.array([*first, *rest], np.intp)
