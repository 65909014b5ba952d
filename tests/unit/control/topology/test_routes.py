from dataclasses import replace
from itertools import pairwise

import networkx as nx
import numpy as np
import pytest
from fat_tree import fat_tree
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.control.topology.build import build_fabric
from hpctrain.control.topology.fabric import NO_PORT, Fabric
from hpctrain.control.topology.readers import ibnetdiscover
from hpctrain.control.topology.routes import Routes
from support.refusals import refused
from support.topology.small_fabric import small_fabric, two_levels


def generated(**shape: int) -> Fabric:
    return build_fabric(ibnetdiscover.read(fat_tree(**shape), "generated"))


def adapters(fabric: Fabric) -> np.ndarray:
    return np.flatnonzero(fabric.level == 0).astype(np.int32)


def with_tables(fabric: Fabric) -> Fabric:
    """The fabric of two_levels(…, spines=1) with its only possible tables, LID = node number + 1."""
    switches = np.flatnonzero(fabric.level > 0).astype(np.int32)
    tables = np.full((len(switches), len(fabric.names) + 1), -1, np.int16)
    ports = {(int(s), int(t)): int(p) for s, t, p in zip(fabric.source, fabric.target, fabric.source_port, strict=True)}
    spine = int(switches[-1])
    for row, switch in enumerate(switches):
        for adapter in adapters(fabric):
            (leaf,) = fabric.target[fabric.source == adapter]
            towards = int(adapter) if switch == leaf else int(leaf) if switch == spine else spine
            tables[row, adapter + 1] = ports[int(switch), towards]
    lid = np.arange(1, len(fabric.names) + 1, dtype=np.int32)
    return replace(fabric, lid=lid, tables=tables, table_switches=switches)


@given(
    sizes=st.lists(st.integers(1, 4), min_size=1, max_size=4),
    spines=st.integers(1, 3),
    rails=st.integers(1, 2),
    cables=st.integers(1, 2),
)
def test_paths_are_shortest_chains_of_links_from_source_to_target(
    sizes: list[int], spines: int, rails: int, cables: int
) -> None:
    fabric = two_levels(sizes, spines=spines, rails=rails, cables=cables)
    source, target = (ends.ravel() for ends in np.meshgrid(adapters(fabric), adapters(fabric)))
    paths = Routes(fabric).paths(source, target)
    graph = nx.Graph(list(zip(fabric.source.tolist(), fabric.target.tolist(), strict=True)))
    hops = dict(nx.all_pairs_shortest_path_length(graph))
    for one, other, (begin, end) in zip(source, target, pairwise(paths.start), strict=True):
        links = paths.link[begin:end]
        assert len(links) == hops[int(one)][int(other)]
        assert [int(one), *fabric.target[links]] == [*fabric.source[links], int(other)]


@pytest.mark.parametrize(
    "shape",
    [
        {"hosts": 24, "leaf_down": 4, "leaf_up": 4},
        {"hosts": 64, "leaf_down": 4, "leaf_up": 4, "levels": 3, "pod_leaves": 4},
    ],
)
def test_no_shift_contends_on_a_full_fat_tree(shape: dict[str, int]) -> None:
    """Zahavi's theorem on D-mod-k; a spread by the destination's place in its leaf alone fails it on three levels."""
    fabric = generated(**shape)
    routes, ends = Routes(fabric), adapters(fabric)
    for shift in range(1, len(ends)):
        assert routes.loads(ends, np.roll(ends, -shift)).max() == 1


def test_switches_cabled_across_and_odd_levels_are_routed_by_shortest_paths() -> None:
    fabric = small_fabric(
        [("a m", "leaf0"), ("b m", "leaf1"), ("c m", "leaf2"), ("leaf0", "leaf1"), ("leaf1", "leaf2")]
    )
    assert list(Routes(fabric).faults()) == []
    assert np.diff(Routes(fabric).paths(np.array([0, 0], np.int32), np.array([1, 2], np.int32)).start).tolist() == [
        3,
        4,
    ]


def test_loads_sum_weights_and_no_flow_takes_a_link_to_itself() -> None:
    fabric = two_levels([2, 2], spines=1)
    a, b, c, _ = adapters(fabric)
    loads = Routes(fabric).loads(np.array([a, b, c]), np.array([c, c, c]), np.array([1.0, 2.0, 4.0]))
    carried = {
        (fabric.names[s], fabric.names[t]): load
        for s, t, load in zip(fabric.source, fabric.target, loads, strict=True)
        if load
    }
    assert carried == {
        ("h00 m0", "leaf0"): 1,
        ("h01 m0", "leaf0"): 2,
        ("leaf0", "spine0"): 3,
        ("spine0", "leaf1"): 3,
        ("leaf1", "h02 m0"): 3,
    }


def test_tables_that_go_round_in_circles_are_found() -> None:
    fabric = with_tables(small_fabric([("a m", "leaf0"), ("b m", "leaf0"), ("leaf0", "spine0")]))
    tables = fabric.tables.copy()
    leaf, spine = 0, 1
    b = fabric.names.index("b m")
    tables[leaf, b + 1], tables[spine, b + 1] = 3, 1
    routes = Routes(replace(fabric, tables=tables))
    with refused("HT-topology-no-route", source="a m", target="b m", at="spine0"):
        routes.paths(np.array([0], np.int32), np.array([b], np.int32))
    assert routes.loads(np.array([b], np.int32), np.array([0], np.int32)).sum() == 2
    faults = sorted(fault.split(":")[0] for fault in routes.faults())
    assert [fault.split()[3:] for fault in faults] == [[switch, "to", "b", "m"] for switch in ("leaf0", "spine0")]


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        (lambda fabric: replace(fabric, tables=np.full_like(fabric.tables, -1)), "leaf0"),
        (lambda fabric: replace(fabric, tables=np.full_like(fabric.tables, 99)), "leaf0"),
        (lambda fabric: replace(fabric, tables=np.full_like(fabric.tables, 1)), "h00 m0"),
        (lambda fabric: replace(fabric, lid=np.zeros_like(fabric.lid)), "leaf0"),
        (lambda fabric: replace(fabric, tables=fabric.tables[:, :2]), "leaf0"),
    ],
    ids=[
        "no port",
        "port without a cable",
        "wrong adapter",
        "no LID",
        "LID beyond the table",
    ],
)
def test_a_lost_flow_names_source_destination_and_where_it_ends(damage, named) -> None:
    fabric = with_tables(two_levels([2, 2], spines=1))
    assert Routes(fabric).paths(np.array([1], np.int32), np.array([3], np.int32)).link.size == 4
    with refused("HT-topology-no-route", source="h01 m0", target="h03 m0", at=named):
        Routes(damage(fabric)).paths(np.array([1], np.int32), np.array([3], np.int32))


def test_the_hint_speaks_of_tables_only_where_some_were_given() -> None:
    def hint(fabric: Fabric) -> str:
        apart = replace(fabric, level=np.where(fabric.level == 2, -1, fabric.level).astype(np.int32))
        with refused("HT-topology-no-route") as caught:
            Routes(apart).paths(np.array([0], np.int32), np.array([1], np.int32))
        return caught.value.hint

    fabric = two_levels([1, 1], spines=1)
    assert "--routes" not in hint(fabric)
    bare = replace(with_tables(fabric), tables=np.full_like(with_tables(fabric).tables, NO_PORT))
    assert "--routes" in hint(bare)


def test_parallel_cables_share_the_flows_up_and_down() -> None:
    fabric = two_levels([4, 4], spines=2, cables=2)
    ends = adapters(fabric)
    assert Routes(fabric).loads(ends, np.roll(ends, 4)).max() == 1
