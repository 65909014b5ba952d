import itertools
import random
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from fat_tree import fat_tree
from hypothesis import given, settings
from hypothesis import strategies as st

from hpctrain.control.topology.build import build_fabric
from hpctrain.control.topology.fabric import Fabric, Ints
from hpctrain.control.topology.placement import report
from hpctrain.control.topology.readers import ibnetdiscover
from hpctrain.control.topology.routes import MinHop, Routes
from support.refusals import refused
from support.topology.small_fabric import small_fabric, two_levels

SPEEDS = st.sampled_from([2.0, 2.0, 2.0, 1.0])


@st.composite
def fabrics(draw: st.DrawFn, *, hosts: int) -> Fabric:
    """Trees of two or three levels, uneven leaves, missing and degraded cables, rails on one leaf or on one each."""
    rails, groups, spines = draw(st.integers(1, 3)), draw(st.integers(1, 4)), draw(st.integers(1, 3))
    rail_optimised, cores = draw(st.booleans()), draw(st.integers(0, 2))
    on = draw(st.lists(st.integers(0, groups - 1), min_size=2, max_size=hosts))
    cables = [
        (f"h{host} m{rail}", f"leaf{group * rails + rail if rail_optimised else group}")
        for host, group in enumerate(on)
        for rail in range(rails)
    ]
    leaves = sorted({leaf for _, leaf in cables})
    for number, leaf in enumerate(leaves):
        pod = number % 2 * spines if cores else 0
        for spine in range(pod, pod + spines):
            if spine == pod or draw(st.booleans()):
                cables += [(leaf, f"spine{spine}", draw(SPEEDS))] * draw(st.integers(1, 2))
    above = sorted({other for _, other, *_ in cables if other.startswith("spine")})
    cables += [(spine, f"core{core}", draw(SPEEDS)) for spine in above for core in range(cores)]
    return small_fabric(cables)


def with_random_tables(fabric: Fabric, seed: int) -> Fabric:
    """Real-looking tables: of the shortest ways to each adapter, each switch takes any."""
    choose = random.Random(seed)
    switches, adapters = np.flatnonzero(fabric.level > 0), np.flatnonzero(fabric.level == 0)
    tables = np.full((len(switches), len(fabric.names) + 1), -1, np.int16)
    for adapter in adapters:
        distance = np.full(len(fabric.names), 99)
        distance[adapter] = 0
        for _ in fabric.names:
            np.minimum.at(distance, fabric.source, distance[fabric.target] + 1)
        for row, switch in enumerate(switches):
            ways = (fabric.source == switch) & (distance[fabric.target] == distance[switch] - 1)
            tables[row, adapter + 1] = choose.choice(fabric.source_port[ways].tolist())
    lid = np.arange(1, len(fabric.names) + 1, dtype=np.int32)
    return replace(fabric, lid=lid, tables=tables, table_switches=switches.astype(np.int32))


def cost(fabric: Fabric, routes: Routes, order: Sequence[int]) -> tuple[float, int]:
    """Worst load and crossings, host by host."""
    following = [*order[1:], order[0]]
    rails = min(len(fabric.adapters(host)) for host in order)
    source = np.concatenate([fabric.adapters(host)[:rails] for host in order])
    target = np.concatenate([fabric.adapters(host)[:rails] for host in following])
    unit = max(fabric.bandwidth[np.isin(fabric.source, source)])
    worst = max(routes.loads(source, target) * unit / fabric.bandwidth)
    crossings = sum(fabric.leaves[one] != fabric.leaves[other] for one, other in zip(order, following, strict=True))
    return round(float(worst), 9), crossings


def every_order(fabric: Fabric, routes: Routes) -> tuple[np.ndarray, np.ndarray]:
    """Worst load and crossings of each ring over all hosts, from what each pair of hosts loads."""
    hosts = range(len(fabric.hosts))
    rails = min(len(fabric.adapters(host)) for host in hosts)
    adapters = np.array([fabric.adapters(host)[:rails] for host in hosts])
    share = max(fabric.bandwidth[np.isin(fabric.source, adapters)]) / fabric.bandwidth
    pair = np.array([[routes.loads(adapters[one], adapters[other]) * share for other in hosts] for one in hosts])
    apart = np.array([[fabric.leaves[one] != fabric.leaves[other] for other in hosts] for one in hosts])
    rings = np.array([(0, *rest, 0) for rest in itertools.permutations(hosts[1:])])
    loads = sum(pair[one, other] for one, other in itertools.pairwise(rings.T))
    crossings = sum(apart[one, other].astype(int) for one, other in itertools.pairwise(rings.T))
    return loads.max(axis=1).round(9), crossings


def against_every_order(fabric: Fabric, given: Sequence[int]) -> None:
    found = report(fabric, given)
    routes = Routes(fabric)
    worst, crossings = every_order(fabric, routes)

    for placement in (found.given, found.name, found.tree, found.placed):
        assert sorted(placement.order) == sorted(given)
        assert (placement.worst_load, placement.crossings) == cost(fabric, routes, placement.order)
    assert list(found.given.order) == list(given)
    limit = min(found.given.worst_load, found.name.worst_load, found.tree.worst_load)
    assert found.placed.worst_load <= limit
    assert found.tree.crossings == found.bound == crossings.min()
    # The least crossings of all orders that contend no more than the three that it must not be worse than.
    assert found.placed.crossings == crossings[worst <= limit].min()
    # Of orders that are equal between leaves, that with fewer crossings of higher switches is better.
    as_given, placed = ((each.worst_load, each.crossings_by_level) for each in (found.given, found.placed))
    assert found.already_optimal == (as_given <= placed)


@pytest.mark.thorough
@settings(max_examples=settings().max_examples // 4, deadline=None)
@given(fabric=fabrics(hosts=9), seed=st.integers(0, 99), tables=st.booleans())
def test_no_order_of_up_to_nine_hosts_has_fewer_crossings(fabric: Fabric, seed: int, tables: bool) -> None:
    fabric = with_random_tables(fabric, seed) if tables else fabric
    against_every_order(fabric, random.Random(seed).sample(range(len(fabric.hosts)), len(fabric.hosts)))


def test_alternating_leaves_are_put_together() -> None:
    fabric = two_levels([4, 4], spines=1)  # 2 bytes a second
    found = report(fabric, [0, 4, 1, 5, 2, 6, 3, 7])
    assert (found.given.crossings, found.given.worst_load) == (8, 4)
    assert (found.placed.crossings, found.placed.worst_load, found.bound) == (2, 1, 2)
    # 2 (n - 1) / n of the buffer over the worst link.
    assert found.given.bandwidth_bytes_per_s == pytest.approx(2 / 4 * 8 / 14)
    assert found.placed.bandwidth_bytes_per_s == pytest.approx(2 * 8 / 14)
    assert not found.already_optimal


def test_pods_are_one_run_each() -> None:
    shape = {"hosts": 32, "leaf_down": 2, "leaf_up": 2, "levels": 3, "pod_leaves": 4, "spine_up": 2, "rails": 2}
    fabric = build_fabric(ibnetdiscover.read(fat_tree(**shape), "generated"))
    shuffled = random.Random(0).sample(range(32), 32)
    found = report(fabric, shuffled)
    assert (found.placed.crossings, found.bound, found.placed.worst_load) == (16, 16, 1)
    pods = [fabric.leaves[host] and min(fabric.leaves[host]) // 4 for host in found.placed.order]
    assert len(list(itertools.groupby(pods))) == len(set(pods)) == 8


def _min_hop_tables(fabric: Fabric) -> Ints:
    """(switches, adapters)."""
    switches, ends = np.flatnonzero(fabric.level > 0), np.flatnonzero(fabric.level == 0)
    row, end = (each.ravel() for each in np.meshgrid(np.arange(len(switches)), ends, indexing="ij"))
    return MinHop(fabric).ports(row, end).reshape(len(switches), len(ends))


def test_an_order_that_contends_less_is_kept_although_it_crosses_more() -> None:
    """Rails between the last two leaves share a cable both ways, so a ring had better go over the first each time."""
    fabric = two_levels([2, 1, 1], spines=4, rails=2)
    tables = np.full((7, 9), -1, np.int16)
    tables[:, 1:] = _min_hop_tables(fabric)
    tables[1, 7:9] = tables[2, 5:7] = 3
    lid = np.where(fabric.level == 0, np.arange(1, 1 + len(fabric.names)), 0).astype(np.int32)
    switches = np.flatnonzero(fabric.level > 0).astype(np.int32)
    found = report(replace(fabric, lid=lid, tables=tables, table_switches=switches), [0, 2, 1, 3])
    assert (found.tree.crossings, found.tree.worst_load) == (3, 2)
    assert (found.placed.order, found.placed.crossings, found.placed.worst_load) == ((0, 2, 1, 3), 4, 1)
    assert found.already_optimal


@pytest.mark.parametrize("lost", [0, 1])
def test_hosts_of_a_rail_optimised_leaf_set_stay_together_where_one_lost_an_adapter(lost: int) -> None:
    cables = [(f"h{host} m{rail}", f"leaf{host % 2 * 2 + rail}") for host in range(6) for rail in range(2)]
    cables.remove((f"h4 m{lost}", f"leaf{lost}"))
    cables += [(f"leaf{leaf}", "spine0") for leaf in range(4)]
    found = report(small_fabric(cables), [0, 1, 2, 3, 4, 5])
    assert (found.rails, found.short, found.bound, found.placed.crossings) == (1, ("h4",), 2, 2)
    assert (found.given.crossings, found.given.worst_load) == (6, 3)


def test_search_finds_the_border_hosts_that_real_tables_do_not_send_over_one_cable() -> None:
    fabric = two_levels([4, 4], spines=2, rails=2)
    lid = np.where(fabric.level == 0, np.arange(1, 1 + len(fabric.names)), 0).astype(np.int32)
    switches = np.flatnonzero(fabric.level > 0).astype(np.int32)
    tables = np.full((4, 17), -1, np.int16)
    tables[:, 1:] = _min_hop_tables(fabric)
    # Both rails of all hosts but one of each leaf go over the first spine: port 9 of both leaves.
    tables[0, 9:15] = tables[1, 1:7] = 9
    found = report(replace(fabric, lid=lid, tables=tables, table_switches=switches), [3, 0, 1, 2, 4, 5, 6, 7])
    assert (found.tree.worst_load, found.placed.worst_load) == (2, 1)
    # Rings enter each leaf by the one host whose rails take both spines.
    order = found.placed.order
    assert {order[place] for place in range(8) if (order[place] < 4) != (order[place - 1] < 4)} == {3, 7}


def test_a_slow_cable_counts_as_more_load_and_is_avoided() -> None:
    cables = [(f"h{host} m0", f"leaf{host // 2}") for host in range(4)]
    cables += [("leaf0", "spine0"), ("leaf0", "spine1"), ("leaf1", "spine0", 1.0), ("leaf1", "spine1")]
    found = report(small_fabric(cables), [0, 1, 2, 3])
    assert found.given.worst_load == 2
    assert found.placed.worst_load == 1


def test_one_host_has_no_ring_and_a_fabric_without_speeds_no_bandwidth() -> None:
    alone = report(two_levels([1], spines=1), [0]).placed
    assert (alone.order, alone.crossings, alone.worst_load, alone.bandwidth_bytes_per_s) == ((0,), 0, 0.0, None)
    fabric = two_levels([2, 2], spines=1)
    nameless = replace(fabric, bandwidth=np.ones_like(fabric.bandwidth))
    assert report(nameless, [0, 2, 1, 3]).placed.bandwidth_bytes_per_s is None


@pytest.mark.parametrize(
    ("hosts", "code", "values"),
    [
        ([0, 1, 0], "HT-placement-host-twice", {"host": "h00"}),
        ([2], "HT-not-in-fabric", {"host": "h02"}),
    ],
)
def test_misuse(hosts: list[int], code: str, values: dict[str, str]) -> None:
    fabric = two_levels([2], spines=1)
    with refused(code, **values):
        report(replace(fabric, hosts=(*fabric.hosts, "h02")), hosts)
