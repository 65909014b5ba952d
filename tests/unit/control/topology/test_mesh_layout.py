"""Meshes over fabrics: what crosses leaves, against one rank after the other by hand, and which order is taken."""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter
from pathlib import Path

import networkx
import numpy as np
import pytest
from fat_tree import fat_tree
from hypothesis import given, settings
from hypothesis import strategies as st

from hpctrain.common.recipes.mesh import AXES, Axis, Mesh
from hpctrain.common.recipes.mesh_traffic import MeshModel, MeshWork
from hpctrain.control.topology.build import build_fabric, read_fabric
from hpctrain.control.topology.fabric import Fabric
from hpctrain.control.topology.mesh_flows import mesh_flows
from hpctrain.control.topology.mesh_layout import TORCH, MeshLayout, host_grid, lay, whole_runs
from hpctrain.control.topology.placement import Rings, report
from hpctrain.control.topology.readers import ibnetdiscover
from support.topology.small_fabric import small_fabric, two_levels

DATA = Path(__file__).parents[5] / "shared" / "data" / "fabrics"
needs_data = pytest.mark.skipif(not DATA.is_dir(), reason=f"no listings of real clusters: {DATA} is absent")
MODEL = MeshModel(parameters=1e6, layers=4, width=64, sequence=32, samples=8)


def work_of(model: MeshModel | None = MODEL, **sizes: int) -> MeshWork:
    mesh = Mesh(**{"dp_replicate": 1, **sizes}).at(math.prod(sizes.values()))
    return MeshWork(mesh=mesh, model=model)


def layout(fabric: Fabric, hosts: list[int], work: MeshWork) -> MeshLayout:
    ranks = math.prod(work.mesh.sizes.values())
    return MeshLayout(Rings(fabric, hosts), work.mesh, mesh_flows(work), [ranks // len(hosts)] * len(hosts))


def bytes_over_leaves(fabric: Fabric, hosts: list[int], work: MeshWork, axes: tuple[Axis, ...] = AXES) -> float:
    """By every flow for itself: the place of each of its ranks, their hosts, and whether these share a leaf."""
    sizes = work.mesh.sizes
    slots = math.prod(sizes.values()) // len(hosts)
    host_of = {}
    for place, at in enumerate(itertools.product(*(range(sizes[axis]) for axis in axes))):
        named = dict(zip(axes, at, strict=True))
        host_of[tuple(named[axis] for axis in AXES)] = hosts[place // slots]
    total = 0.0
    for flows in mesh_flows(work).values():
        for source, target, nbytes in zip(flows.source, flows.target, flows.nbytes, strict=True):
            one, other = (host_of[tuple(work.mesh.coordinates(int(rank)).values())] for rank in (source, target))
            total += float(nbytes) if fabric.leaves[one] != fabric.leaves[other] else 0.0
    return total


MESHES = [
    {"dp_shard": 4, "pp": 2, "tp": 2},
    {"dp_replicate": 2, "dp_shard": 2, "pp": 2, "tp": 2},
    {"dp_shard": 16},
    {"tp": 4, "pp": 4},
    {"dp_replicate": 2, "cp": 4, "tp": 2},
]


@settings(max_examples=40)
@given(st.sampled_from(MESHES), st.permutations(range(8)), st.lists(st.integers(1, 4), min_size=2, max_size=4))
def test_bytes_over_leaves_are_those_counted_one_by_one(sizes: dict[str, int], order: list[int], leaves: list[int]):
    fabric = two_levels([*leaves, 8], spines=2)
    work = work_of(**sizes)
    found = layout(fabric, list(range(8)), work)
    for axes in (AXES, TORCH):
        laid = found.traffic_of(np.array(order), axes)
        assert laid.over_leaves == pytest.approx(bytes_over_leaves(fabric, order, work, axes))
        everything = sum(float(flows.nbytes.sum()) for flows in mesh_flows(work).values())
        assert sum(sum(axis.levels) for axis in laid.axes) == pytest.approx(everything)


@settings(max_examples=30)
@given(st.sampled_from(MESHES), st.permutations(range(8)))
def test_links_carry_the_bytes_of_the_flows_whose_path_they_are_on(sizes: dict[str, int], order: list[int]):
    # One spine: there is one path between two hosts, which another library finds as well.
    fabric = two_levels([3, 3, 2], spines=1)
    graph = networkx.Graph(zip(fabric.source.tolist(), fabric.target.tolist(), strict=True))
    work = work_of(**sizes)
    loads: Counter[tuple[int, int]] = Counter()
    for flows in mesh_flows(work).values():
        for source, target, nbytes in zip(flows.source, flows.target, flows.nbytes, strict=True):
            one, other = (fabric.adapters(order[int(rank) // 2])[0] for rank in (source, target))
            for link in itertools.pairwise(networkx.shortest_path(graph, one, other)):
                loads[link] += float(nbytes)
    laid = layout(fabric, list(range(8)), work).traffic_of(np.array(order))
    assert laid.busiest_link == pytest.approx(max(loads.values()))
    assert laid.busiest_seconds == pytest.approx(max(loads.values()) / 2)


def loud(axis: str) -> MeshModel:
    """Of which one axis sends much more."""
    return MeshModel(parameters=1e9 if axis == "dp_shard" else 1, layers=1, width=100, sequence=100, samples=100)


@pytest.mark.parametrize("axis", ["dp_shard", "pp"])
def test_the_loudest_axis_stays_within_leaves(axis: str):
    # Leaves of hosts 0, 1 and 2, 3, named so that neither axis is within one: ranks are dp_shard 2 x pp 2.
    fabric, given_order = two_levels([2, 2], spines=2), [0, 2, 3, 1]
    work = work_of(loud(axis), dp_shard=2, pp=2)
    laid = lay(fabric, given_order, report(fabric, given_order).placed.order, dict.fromkeys(range(4), 1), work)
    levels = {each.axis: each.levels for each in laid.traffic.laid.axes}
    assert sum(levels[axis][2:]) == 0  # type: ignore[index]
    assert laid.traffic.laid.over_leaves == min(
        bytes_over_leaves(fabric, list(order), work) for order in itertools.permutations(range(4))
    )
    assert bytes_over_leaves(fabric, list(laid.order), work) == laid.traffic.laid.over_leaves


def test_ranks_of_a_host_share_its_rails():
    # Each rail has a leaf of its own. Along dp_shard a rank of each host talks to the same one of the next.
    fabric = small_fabric(
        [(f"h{host} m{rail}", f"leaf{rail}") for host in range(2) for rail in range(2)]
        + [(f"leaf{rail}", "spine0") for rail in range(2)]
    )
    laid = layout(fabric, [0, 1], work_of(dp_shard=2, tp=4)).traffic_of(np.arange(2))
    along = {each.axis: each for each in laid.axes}
    assert along["dp_shard"].levels[0] == 0 == sum(along["dp_shard"].levels[2:])
    assert along["tp"].between_nodes == 0
    # Where tp goes over nodes, each rank sends a quarter of that to the rank at its place, which is on its rail.
    laid = layout(fabric, [0, 1], work_of(tp=8)).traffic_of(np.arange(2))
    (crossing,) = laid.axes
    assert crossing.levels[:2] == (6 * crossing.sent, 2 * crossing.sent)
    assert sum(crossing.levels[2:]) == 0
    assert laid.busiest_link == crossing.sent / 2


def test_hosts_with_unlike_numbers_of_ranks():
    fabric = two_levels([2, 1], spines=1)
    laid = lay(fabric, [0, 2, 1], report(fabric, [0, 2, 1]).placed.order, {0: 1, 1: 2, 2: 1}, work_of(dp_shard=4))
    assert set(laid.order) == {0, 1, 2}
    (axis,) = laid.traffic.laid.axes
    # One of the four neighbours is within host 1, and two cross to and from host 2.
    assert [levels / axis.sent for levels in axis.levels] == [1, 1, 2]


def test_the_order_of_a_script_is_by_leaf():
    fabric = two_levels([2, 2], spines=2)
    placed = report(fabric, [0, 2, 3, 1]).placed.order
    laid = lay(fabric, [0, 2, 3, 1], placed, dict.fromkeys(range(4), 2), work_of(None, dp_shard=2, tp=4))
    assert laid.order == placed
    assert not laid.traffic.in_bytes
    assert laid.traffic.warning is not None
    assert laid.traffic.warning.startswith("tp 4 ")


def test_levels_of_a_deeper_tree():
    fabric = build_fabric(
        ibnetdiscover.read(fat_tree(hosts=8, leaf_down=2, leaf_up=2, levels=3, pod_leaves=2), "fat tree")
    )
    laid = layout(fabric, list(range(8)), work_of(dp_shard=8)).traffic_of(np.arange(8))
    (axis,) = laid.axes
    # In the node, in the leaf, between leaves of a pod, and between the two pods.
    assert [bytes_ / axis.sent for bytes_ in axis.levels] == [0, 4, 2, 2]


@pytest.mark.parametrize(
    ("sizes", "slots", "grid"),
    [
        ([1, 16, 4, 1, 8], 8, [1, 16, 4, 1, 1]),
        ([1, 16, 4, 1, 4], 8, [1, 16, 2, 1, 1]),
        ([2, 2, 1, 1, 16], 8, [2, 2, 1, 1, 2]),
        ([2, 2, 3, 1, 2], 4, None),
        ([4, 1, 1, 1, 3], 2, None),
        ([4, 2, 1, 1, 3], 1, [4, 2, 1, 1, 3]),
    ],
)
def test_hosts_along_the_axes(sizes: list[int], slots: int, grid: list[int] | None):
    assert host_grid(sizes, slots) == grid


@given(st.lists(st.integers(0, 3), min_size=1, max_size=20), st.integers(1, 5), st.randoms(use_true_random=False))
def test_whole_runs_are_within_a_leaf(leaves: list[int], run: int, choose: random.Random):
    order = np.array(choose.sample(range(len(leaves)), len(leaves)))
    found = whole_runs(order, np.array(leaves), run)
    assert sorted(found.tolist()) == list(range(len(leaves)))
    whole = sum(count // run for count in Counter(leaves).values())
    for first in range(0, whole * run, run):
        assert len({leaves[host] for host in found[first : first + run]}) == 1


@needs_data
@pytest.mark.parametrize(
    ("listing", "tables"), [("dgx-ndr-119.ibnetdiscover", None), ("avakas/ibnetdiscover-p.txt", "avakas/ibroutes")]
)
def test_64_hosts_of_real_clusters(listing: str, tables: str | None):
    fabric = read_fabric([DATA / listing], DATA / tables if tables else None)
    rails = [len(fabric.adapters(host)) for host in range(len(fabric.hosts))]
    hosts = random.Random(0).sample([host for host, count in enumerate(rails) if count == max(rails)], 64)
    model = MeshModel(parameters=76.1e9, layers=60, width=10240, sequence=2048, samples=112, parameter_bytes=2)
    work = work_of(model, tp=8, pp=4, dp_shard=16)
    laid = lay(fabric, hosts, report(fabric, hosts).placed.order, dict.fromkeys(hosts, 8), work)
    found = {name: order.over_leaves for name, order in laid.traffic.orders.items()}
    assert found["laid"] == pytest.approx(bytes_over_leaves(fabric, list(laid.order), work))
    assert found["torch"] == pytest.approx(bytes_over_leaves(fabric, hosts, work, TORCH))
    assert found["laid"] <= found["torch_placed"] * (1 + 1e-9)
    assert found["laid"] < 0.7 * min(found["given"], found["torch"])
