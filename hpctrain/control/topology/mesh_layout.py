"""Lays a mesh over a fabric: chooses the host of each part, and counts the traffic that crosses leaves. Pure.

Ranks are numbered with tp innermost and fill one host after the other, so the order of the hosts alone decides which
axes stay within a leaf. The axis with the most traffic depends on the model, so all orders are tried that keep one axis
after the other together along the tree of the switches.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, permutations
from operator import mul

import numpy as np

from hpctrain.common.recipes.mesh import AXES, Axis, Mesh
from hpctrain.common.recipes.mesh_traffic import AxisTraffic, LaidMesh, MeshModel, MeshTraffic, MeshWork
from hpctrain.control.topology.fabric import Fabric, Floats, Ints
from hpctrain.control.topology.placement import Order, Rings
from hpctrain.control.topology.subtrees import subtrees_of

TORCH: tuple[Axis, ...] = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
"""torchtitan's order of axes, outermost first (torchtitan, torchtitan/distributed/parallel_dims.py)."""


# The model of Narayanan et al. 2021, arXiv 2104.04473, table 1, that is trained with tp 8 and pp 4: 60 layers of width
# 10240, batches of 1792 samples of 2048 tokens; settings in NVIDIA/Megatron-LM, examples/sc21/run_table_1.sh. The
# element types are torchtitan's: gradients are reduced in float32, all else travels in bf16.
_PUBLISHED = MeshModel(
    parameters=76.1e9, layers=60, width=10240, sequence=2048, parameter_bytes=2, gradient_bytes=4, activation_bytes=2
)
_PUBLISHED_BATCH = 1792


def published_work(mesh: Mesh) -> MeshWork:
    """A mesh with the published model of 76.1 billion parameters, for questions without a recipe."""
    return MeshWork(mesh=mesh, model=replace(_PUBLISHED, samples=_PUBLISHED_BATCH / mesh.data_ranks))


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
        found = [
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
            axes=tuple(found),
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
        for flows in (each.over_rails(hosts) for each in self.flows.values()):
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
    found = []
    for level in levels:
        together = left & (level[flows.source] == level[flows.target])
        found.append(float(flows.nbytes[together].sum()))
        left &= ~together
    assert not left.any()
    return tuple(found)


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


# The stages per rank of schedules with several: the minimum of torch.distributed.pipelining.
_LOOPS = 2


@dataclass(frozen=True, kw_only=True)
class MeshFlows:
    """The bytes that ranks send in a step, from each source rank to the target rank at the same index.

    Attributes:
        ring: the number of ranks in each of the rings, whose flows come one ring after the other, in its order; 1 for
            flows that are none.
    """

    source: Ints
    target: Ints
    nbytes: Floats
    ring: int = 1

    @property
    def sent(self) -> float:
        """The most bytes that one rank sends."""
        return float(np.bincount(self.source, self.nbytes).max(initial=0.0))

    def over_rails(self, hosts: Order) -> MeshFlows:
        """The same where rings have several ranks on each of their hosts: these divide what goes to the next host.

        NCCL has a ring for each adapter, which leaves a host where it came in (``NCCL_CROSS_NIC=0``,
        https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html), so that each rank sends its part to the one
        at its own place on the next host. Rings that do not have equally many ranks on each host stay as they are.

        Args:
            hosts: of each rank.
        """
        members = self.source.reshape(-1, self.ring)
        leaving = hosts[members] != np.roll(hosts[members], -1, axis=1)
        here = self.ring // max(1, int(leaving[0].sum()))
        if here == 1 or (leaving != (np.arange(1, self.ring + 1) % here == 0)).any():
            return self
        inside = ~leaving.ravel()
        return MeshFlows(
            source=np.concatenate([self.source[inside], self.source]),
            target=np.concatenate([self.target[inside], np.roll(members, -here, axis=1).ravel()]),
            nbytes=np.concatenate([self.nbytes[inside], self.nbytes / here]),
        )


def mesh_flows(work: MeshWork) -> dict[Axis, MeshFlows]:
    """The flows along each axis with several ranks; 1 byte to each neighbour where the model is not known.

    FSDP's groups are those along dp_shard and cp together, as ranks along cp have the same parameters and other tokens
    (torchtitan, torchtitan/distributed/parallel_dims.py, ``dp_shard_cp``). They are listed under dp_shard.
    """
    found: dict[Axis, MeshFlows] = {}
    for axis, nbytes in mesh_bytes(work).items():
        if axis == "pp":
            found[axis] = pipeline_flows(work.mesh, nbytes, work.pipeline.schedule)
        else:
            found[axis] = ring_flows(work.mesh, next(axes for axes in _RINGS if axes[0] == axis), nbytes)
    return found


def mesh_bytes(work: MeshWork) -> dict[Axis, float]:
    """The bytes that a rank sends to a neighbour along each axis with several ranks; see :func:`mesh_flows`."""
    sizes = work.mesh.sizes
    found = {
        axes[0]: 1.0 if work.model is None else nbytes(work, work.model)
        for axes, nbytes in _RINGS.items()
        if math.prod(sizes[axis] for axis in axes) > 1
    }
    if sizes["pp"] > 1:
        found["pp"] = 1.0 if work.model is None else stage_bytes(work.model, sizes)
    return {axis: found[axis] for axis in AXES if axis in found}


def replicated_bytes(work: MeshWork, model: MeshModel) -> float:
    """The bytes of an all-reduce of gradients or their shards (Zhao et al. 2023, arXiv 2304.11277, section 3.2.2)."""
    ranks = work.mesh.sizes["dp_replicate"]
    return 2 * (ranks - 1) / ranks * _parameters(model, work.mesh.sizes) / _shards(work) * model.gradient_bytes


def sharded_bytes(work: MeshWork, model: MeshModel) -> float:
    """The bytes of FSDP, which gathers parameters for the forward pass, with ZeRO 3 once more for the backward pass,
    and reduces and scatters gradients (Rajbhandari et al. 2020, arXiv 1910.02054, section 7).

    Stages of a pipeline gather once for all micro-batches. Where gradients are accumulated, each part gathers anew.
    """
    sizes, ranks = work.mesh.sizes, _shards(work)
    gathers = model.parts * (2 if work.sharding.zero == 3 and sizes["pp"] == 1 else 1)
    each = gathers * model.parameter_bytes + model.gradient_bytes
    return (ranks - 1) / ranks * _parameters(model, sizes) * each


def tensor_bytes(work: MeshWork, model: MeshModel) -> float:
    """The bytes of two all-reduces of the activations in a layer's forward pass, and two in its backward pass.

    Shoeybi et al. 2019, arXiv 1909.08053, section 3. Sequence parallelism makes of each a gather and a scatter of as
    many bytes together (Korthikanti et al. 2022, arXiv 2205.05198, section 4.2.2). Recomputation repeats those of the
    forward pass.
    """
    sizes = work.mesh.sizes
    ranks, allreduces = sizes["tp"], 6 if work.sharding.recompute else 4
    return allreduces * 2 * (ranks - 1) / ranks * stage_bytes(model, sizes) * model.layers / sizes["pp"]


def context_bytes(work: MeshWork, model: MeshModel) -> float:
    """The bytes of ring attention (Liu et al. 2023, arXiv 2310.01889).

    Keys and values travel round the ring to the last rank, in the forward pass and again in the backward pass, and
    their gradients return to the ranks that own them.
    """
    sizes = work.mesh.sizes
    passes = (3 if work.sharding.recompute else 2) * (sizes["cp"] - 1) + sizes["cp"]
    return passes * 2 * stage_bytes(model, sizes) / sizes["tp"] * model.layers / sizes["pp"]


_RINGS: Mapping[tuple[Axis, ...], Callable[[MeshWork, MeshModel], float]] = {
    ("dp_replicate",): replicated_bytes,
    ("dp_shard", "cp"): sharded_bytes,
    ("cp",): context_bytes,
    ("tp",): tensor_bytes,
}


def stage_bytes(model: MeshModel, sizes: Mapping[Axis, int]) -> float:
    """The bytes of the activations of all micro-batches that a rank sends to the next stage, and of the gradients that
    it gets back. Ranks along tp all send the whole activations, which each has between layers (Narayanan et al. 2021,
    arXiv 2104.04473, sections 2.2 and 4.1).
    """
    return model.samples * model.sequence / sizes["cp"] * model.width * model.activation_bytes


def _parameters(model: MeshModel, sizes: Mapping[Axis, int]) -> float:
    """The parameters of a rank: those of its stage, divided along tp."""
    return model.parameters / (sizes["tp"] * sizes["pp"])


def _shards(work: MeshWork) -> int:
    return work.mesh.sizes["dp_shard"] * work.mesh.sizes["cp"]


def groups(mesh: Mesh, axes: Sequence[Axis]) -> Ints:
    """The ranks of each group along some axes, in their order, (groups, members)."""
    sizes = list(mesh.sizes.values())
    ranks = np.arange(math.prod(sizes), dtype=np.int32).reshape(sizes)
    last = [AXES.index(axis) for axis in axes]
    members = math.prod(sizes[axis] for axis in last)
    found: Ints = np.moveaxis(ranks, last, range(-len(last), 0)).reshape(-1, members)
    return found


def ring_flows(mesh: Mesh, axes: Sequence[Axis], nbytes: float) -> MeshFlows:
    """Every rank of each group sends ``nbytes`` to the next."""
    members = groups(mesh, axes)
    following = np.roll(members, -1, axis=1)
    sent = np.full(members.size, float(nbytes))
    return MeshFlows(source=members.ravel(), target=following.ravel(), nbytes=sent, ring=members.shape[1])


def pipeline_flows(mesh: Mesh, nbytes: float, schedule: str) -> MeshFlows:
    """Activations from each stage to the next, and gradients back, where the two are on different ranks."""
    members = groups(mesh, ("pp",))
    stages = np.array(stage_ranks(schedule, members.shape[1]))
    before, after = stages[:-1], stages[1:]
    elsewhere = before != after
    forward, backward = members[:, before[elsewhere]].ravel(), members[:, after[elsewhere]].ravel()
    return MeshFlows(
        source=np.concatenate([forward, backward]),
        target=np.concatenate([backward, forward]),
        nbytes=np.full(2 * forward.size, float(nbytes)),
    )


def stage_ranks(schedule: str, ranks: int) -> list[int]:
    """The rank along pp of each stage.

    Sources: Narayanan et al. 2021, section 2.2 (interleaved); Qi et al. 2023, arXiv 2401.10241, section 6 (ZBV: there
    and back); torch.distributed.pipelining, ``schedules.py``.
    """
    once = list(range(ranks))
    if schedule in ("gpipe", "1f1b"):
        return once
    return once + once[::-1] if schedule == "zbv" else once * _LOOPS
