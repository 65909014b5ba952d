"""Slots: every rank has one, no core twice, adapters evenly used."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.common.cluster.node_map import PCI_CLASSES, Adapter, Gpu, NodeMap, NumaNode, slots
from hpctrain.control.topology.pcie import node_map_of_tree, pci_class
from support.refusals import refused


@st.composite
def node_maps(draw: st.DrawFn) -> NodeMap:
    """Hosts of up to 3 NUMA nodes, with devices on up to 2 switches below each of up to 2 host bridges."""
    numa = draw(st.integers(1, 3))
    widths = draw(st.lists(st.integers(0, 6), min_size=numa, max_size=numa))
    nodes = [NumaNode(index=i, cores=tuple(range(10 * i, 10 * i + width))) for i, width in enumerate(widths)]

    def place(name: str) -> tuple[int | None, tuple[str, ...]]:
        node, bridge, switch = draw(st.tuples(st.integers(0, numa - 1), st.integers(0, 1), st.integers(0, 2)))
        root = (f"{node} {bridge}",)
        told = None if draw(st.booleans()) and draw(st.booleans()) else node
        return told, (*root, f"{root} root", f"up {switch}", name) if switch else (*root, name)

    gpus, adapters = {}, {}
    for index in range(draw(st.integers(0, 8))):
        node, bridges = place(f"gpu {index}")
        gpus[Gpu(index=index, bus_id=f"0000:{index:02x}:00.0", numa=node)] = bridges
    for index in range(draw(st.integers(0, 5))):
        node, bridges = place(f"adapter {index}")
        layer = draw(st.sampled_from(["InfiniBand", "Ethernet", None]))
        active = draw(st.sampled_from([True, True, False, None]))
        bus_id = f"0000:{index + 32:02x}:00.0"
        adapter = Adapter(name=f"mlx5_{index}", bus_id=bus_id, numa=node, link_layer=layer, active=active)
        adapters[adapter] = bridges
    return node_map_of_tree(gpus, adapters, nodes, where="generated")


@given(node_maps(), st.data())
def test_each_rank_has_a_place_of_its_own_and_adapters_are_evenly_used(node_map: NodeMap, data: st.DataObject) -> None:
    cores = {core for node in node_map.numa_nodes for core in node.cores}
    most = min(len(node_map.gpus) or 16, len(cores) or 16)
    ranks = data.draw(st.integers(1, most))

    placed = slots(node_map, ranks)

    assert [slot.gpu for slot in placed] == (list(range(ranks)) if node_map.gpus else [None] * ranks)
    used = [core for slot in placed for core in slot.cores]
    assert len(used) == len(set(used)) and set(used) <= cores
    with_cores = [node for node in node_map.numa_nodes if node.cores]
    known = [slot.gpu is None or node_map.gpus[slot.gpu].numa is not None or len(with_cores) == 1 for slot in placed]
    assert [bool(slot.cores) for slot in placed] == [bool(cores) and each for each in known]
    usable = {a.name: a for a in node_map.fabric_adapters}
    assert {slot.adapter for slot in placed} <= {*usable, None}
    loads = Counter(slot.adapter for slot in placed)
    for slot in placed if node_map.gpus else ():
        gpu = node_map.gpus[slot.gpu or 0]
        steps = {name: PCI_CLASSES.index(node_map.distance(gpu, adapter)) for name, adapter in usable.items()}
        for name, step in steps.items() if slot.adapter else ():
            assert step >= steps[slot.adapter]
            assert step > steps[slot.adapter] or loads[slot.adapter] <= loads[name] + 1


@given(st.integers(1, 24), st.lists(st.integers(1, 12), min_size=1, max_size=4), st.integers(1, 6))
def test_without_gpus_cores_and_adapters_are_shared_evenly(ranks: int, widths: list[int], adapters: int) -> None:
    nodes = [NumaNode(index=i, cores=tuple(range(100 * i, 100 * i + width))) for i, width in enumerate(widths)]
    devices = {Adapter(name=f"mlx5_{i}", bus_id=None, numa=i % len(widths)): ("root", str(i)) for i in range(adapters)}
    node_map = node_map_of_tree({}, devices, nodes, where="generated")
    if ranks > sum(widths):
        with refused("HT-ranks-too-many", ranks=ranks, cores=sum(widths)):
            slots(node_map, ranks)
        return

    placed = slots(node_map, ranks)

    loads = Counter(slot.adapter for slot in placed)
    for home in range(len(widths)):
        of_node = [loads[a.name] for a in devices if a.numa == home]
        assert None in loads or not of_node or max(of_node) - min(of_node) <= 1
    homes = [slot.cores[0] // 100 for slot in placed]
    assert homes == sorted(homes)
    for node in set(homes):
        shares = [len(slot.cores) for slot, home in zip(placed, homes, strict=True) if home == node]
        assert max(shares) - min(shares) <= 1
        assert sum(shares) == widths[node]


def test_a_full_numa_node_lends_from_the_one_with_most_to_spare() -> None:
    gpus = {Gpu(index=i, bus_id=str(i), numa=0): ("root", str(i)) for i in range(3)}
    nodes = [NumaNode(index=0, cores=(0, 1)), NumaNode(index=1, cores=(2,)), NumaNode(index=2, cores=(3, 4, 5, 6))]
    placed = slots(node_map_of_tree(gpus, {}, nodes, where="test"), 3)
    assert [slot.cores for slot in placed] == [(0,), (1,), (3, 4, 5, 6)]


def test_a_gpu_with_a_choice_steps_aside_for_one_without() -> None:
    """GPU 0 reaches both adapters at PHB; GPU 1 is on the switch of the first."""
    gpus = {
        Gpu(index=0, bus_id="a", numa=0): ("root", "a"),
        Gpu(index=1, bus_id="b", numa=0): ("root", "port", "switch", "b"),
    }
    adapters = {
        Adapter(name="mlx5_0", bus_id="c", numa=0): ("root", "port", "switch", "c"),
        Adapter(name="mlx5_1", bus_id="d", numa=0): ("root", "d"),
    }
    placed = slots(node_map_of_tree(gpus, adapters, [], where="test"), 2)
    assert [slot.adapter for slot in placed] == ["mlx5_1", "mlx5_0"]


def test_what_training_leaves_out_is_named() -> None:
    adapters = {
        Adapter(name="mlx5_0", bus_id="a", numa=0, link_layer="Ethernet"): ("root", "a"),
        Adapter(name="mlx5_1", bus_id="b", numa=0, link_layer="InfiniBand", active=False): ("root", "b"),
    }
    node_map = node_map_of_tree({}, adapters, [], where="test")
    assert slots(node_map, 1)[0].adapter is None
    assert node_map.warnings == (
        "test: mlx5_0 is Ethernet: left out",
        "test: mlx5_1 is down: left out",
        "test: no GPU",
        "test: no adapter with RDMA that is up",
    )


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [
        (("h0", "root", "up", "down 0"), ("h0", "root", "up", "down 1"), "PIX"),
        (("h0", "root"), ("h0", "root"), "PIX"),
        (("h0", "root", "up", "down 0"), ("h0", "root", "up", "down 1", "up 2", "down 2"), "PXB"),
        (("h0", "root", "up", "down 0"), ("h0", "root", "up", "down 1", "PCI bridge"), "PXB"),
        (("h0", "root 0"), ("h0", "root 1"), "PHB"),
        (("h0", "root"), ("h1", "root"), "NODE"),
    ],
)
def test_distance_from_the_bridges_above(a: tuple[str, ...], b: tuple[str, ...], expected: str) -> None:
    assert pci_class(0, a, 0, b) == pci_class(0, b, 0, a) == expected


@pytest.mark.parametrize(("a", "b"), [(0, 1), (None, 0), (None, None)])
def test_devices_of_no_common_numa_node_are_far(a: int | None, b: int | None) -> None:
    assert pci_class(a, ("h0", "x"), b, ("h1", "y")) == "SYS"
