"""Traffic and ranks are restricted only where a node map gives a reason to: other machines' files, and any map."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.common.cluster.adapter_kinds import link_layer_of_name, verbs_devices
from hpctrain.common.cluster.launch_files import host_variables, slot_variables
from hpctrain.common.cluster.node_map import PCI_CLASSES, Adapter, Gpu, NodeMap, NumaNode, Slot, checked, slots
from hpctrain.common.errors import HpctrainError
from hpctrain.control.topology.node_file import read_node_map
from hpctrain.control.topology.readers import hwloc, nccl, nvidia_smi
from support.refusals import refused
from support.topology.node_texts import hwloc_export

GPU_CLASS = 'class="0x030200" vendor="0x10de" device="0x2330"'


def smi(
    cells: Sequence[Sequence[str]], cpus: Sequence[str], numa: Sequence[str] = (), names: Sequence[str] | None = None
) -> str:
    """A matrix of GPUs and adapters, by the classes between them, with a legend of the adapters unless None."""
    gpus = [f"GPU{i}" for i in range(len(cells))]
    nics = [f"NIC{i}" for i in range(len(cells[0]))]
    lines = ["\t" + "\t".join([*gpus, *nics]) + "\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID"]
    for i, row in enumerate(cells):
        links = [" X " if i == j else "NV18" for j in range(len(gpus))]
        lines.append("\t".join([gpus[i], *links, *row, cpus[i], numa[i] if numa else "N/A", "", "N/A"]))
    for j, nic in enumerate(nics):
        lines.append(
            "\t".join([nic, *(row[j] for row in cells), *(" X " if j == k else "SYS" for k in range(len(nics)))])
        )
    legend = ["", "NIC Legend:", "", *(f"  {nic}: {name}" for nic, name in zip(nics, names or [], strict=False))]
    return "\n".join([*lines, *(legend if names is not None else [])]) + "\n"


def net(name: str, speed: int = 400000, port: int = 1) -> str:
    return f'<nic><net name="{name}" dev="0" speed="{speed}" port="{port}" guid="0x1" maxconn="131072" gdr="1"/></nic>'


def pci(bus: int, attributes: str, inside: str) -> str:
    return f'<pci busid="0000:{bus:02x}:00.0" {attributes}>{inside}</pci>'


def gpu(bus: int, dev: int | None) -> str:
    number = "" if dev is None else f'dev="{dev}" '
    return pci(bus, GPU_CLASS, f'<gpu {number}sm="90" rank="0" gdr="1"/>')


def switch(bus: int, *inside: str) -> str:
    return pci(bus, 'class="0x060400"', "".join(inside))


def system(*cpus: str, affinity: str = "0000000f", host: str = "") -> str:
    """A file of NCCL's; CPU i has the CPUs of the mask, moved by 32 i."""
    of_host = f'host_hash="{host}" ' if host else ""
    parts = [
        f'<cpu {of_host}numaid="{i}" affinity="{affinity}{",00000000" * i}" arch="x86_64">{inside}</cpu>'
        for i, inside in enumerate(cpus)
    ]
    return f'<system version="1">{"".join(parts)}</system>'


def infiniband(bus: int, name: str, speed: int = 400000) -> str:
    return pci(bus, 'class="0x020700" vendor="0x15b3" device="0x1021"', net(name, speed))


def ethernet(bus: int, name: str, identity: str = 'vendor="0x15b3" device="0x1021"', speed: int = 400000) -> str:
    return pci(bus, f'class="0x020000" {identity}', net(name, speed))


EFA = 'vendor="0x1d0f" device="0xefa1"'
CASSINI = 'vendor="0x17db" device="0x0501"'


def variables(node_map: NodeMap, ranks: int) -> tuple[str | None, list[str | None]]:
    placed = slots(node_map, ranks)
    return host_variables(placed).get("NCCL_IB_HCA"), [slot_variables(slot).get("UCX_NET_DEVICES") for slot in placed]


# nvidia-smi topo -m


def test_a_list_of_single_cpus_that_was_cut_binds_no_rank() -> None:
    cut = ["0,2,4,6,8,10", "0,2,4,6,8,10", "1,3,5,7,9,11", "1,3,5,7,9,11"]
    node_map = nvidia_smi.read(smi([["PIX", "SYS"]] * 2 + [["SYS", "PIX"]] * 2, cut, "0011", ["mlx5_0", "mlx5_1"]), "f")
    placed = slots(node_map, 4)
    assert [(slot.cores, slot.numa) for slot in placed] == [((), 0), ((), 0), ((), 1), ((), 1)]
    assert variables(node_map, 4) == ("=mlx5_0,mlx5_1", ["mlx5_0:1", "mlx5_0:1", "mlx5_1:1", "mlx5_1:1"])
    (warning,) = node_map.warnings
    assert re.findall("node ([0-9])", warning) == ["0", "1"]


@pytest.mark.parametrize(
    ("cpus", "numa", "cores", "node"),
    [
        (["0,8,16,24,32,40"], ["0"], (), 0),
        (["0,2,4,6"], ["3"], (), 3),
        (["0-3,8-11,16-19,24-27"], ["1"], (), 1),
        (["0-3,8-10"], ["1"], (), 1),
        (["0-3,"], ["1"], (), 1),
        (["0,2,4,6,8,10"], ["N/A"], (), None),
        (["0-71"], ["0,2-17"], tuple(range(72)), 0),
        (["72-143"], ["1,18-33"], tuple(range(72, 144)), 1),
        (["48-63,176-191"], ["3"], tuple(range(48, 64)), 3),
        (["0-127"], ["0-1"], tuple(range(128)), None),
        (["N/A"], ["1"], (), 1),
    ],
)
def test_cores_of_an_affinity(cpus: list[str], numa: list[str], cores: tuple[int, ...], node: int | None) -> None:
    [slot] = slots(nvidia_smi.read(smi([["PIX"]], cpus, numa, ["mlx5_0"]), "f"), 1)
    assert (slot.cores, slot.numa) == (cores, node)


@pytest.mark.parametrize(
    ("cells", "expected"),
    [
        # All cells equal, or equal in each row: nothing tells one adapter from another.
        ([["SYS"] * 4] * 2, (None, [None, None])),
        ([["NODE"] * 4, ["SYS"] * 4], (None, [None, None])),
        # The same adapters are nearest to all: whether the others are for storage is not known.
        ([["PHB", "PHB", "SYS", "SYS"]] * 2, (None, [None, None])),
        # All of the nearest, not one by its order.
        (
            [["NODE", "NODE", "SYS", "SYS"], ["SYS", "SYS", "NODE", "NODE"]],
            ("=mlx5_0,mlx5_1,mlx5_2,mlx5_3", ["mlx5_0:1,mlx5_1:1", "mlx5_2:1,mlx5_3:1"]),
        ),
        ([["PIX", "SYS", "NODE", "SYS"], ["SYS", "PIX", "SYS", "NODE"]], ("=mlx5_0,mlx5_1", ["mlx5_0:1", "mlx5_1:1"])),
    ],
)
def test_which_adapters_distances_single_out(
    cells: list[list[str]], expected: tuple[str | None, list[str | None]]
) -> None:
    names = [f"mlx5_{i}" for i in range(4)]
    node_map = nvidia_smi.read(smi(cells, ["0-7", "8-15"], "01", names), "f")
    assert variables(node_map, 2) == expected
    assert node_map.warnings == ()


def test_a_matrix_without_its_legend_names_no_devices() -> None:
    node_map = nvidia_smi.read(smi([["PIX", "SYS"], ["SYS", "PIX"]], ["0-7", "8-15"], "01"), "f")
    assert variables(node_map, 2) == (None, [None, None])
    assert [slot.cores for slot in slots(node_map, 2)] == [tuple(range(8)), tuple(range(8, 16))]
    assert ["Legend" in warning for warning in node_map.warnings] == [True]


# names


@pytest.mark.parametrize(
    ("name", "devices"),
    [
        ("mlx5_0", ("mlx5_0",)),
        ("rail0_dma", ("rail0",)),
        ("mlx5_0+mlx5_1", ("mlx5_0", "mlx5_1")),
        ("mlx5_0_dma+mlx5_1_dma", ("mlx5_0", "mlx5_1")),
        ("mlx5_0:1", ("mlx5_0:1",)),
        ("roceP2p1s0", ("roceP2p1s0",)),
        ("0000:0c:00.0", ()),
        ("0c:00.0", ()),
        ("NIC3", ()),
        ("mlx5_0+", ()),
    ],
)
def test_devices_behind_a_name(name: str, devices: tuple[str, ...]) -> None:
    assert verbs_devices(name) == devices


@pytest.mark.parametrize(
    ("names", "layer"),
    [
        (("ibp12s0", "opap1s0", "hfi1_0", "mlx5_ib3"), "InfiniBand"),
        (("mlx5_bond_0", "roceP2p1s0", "bnxt_re0", "irdma0", "mlx5_an0"), "Ethernet"),
        (("iwp1s0", "cxgb4_0", "i40iw0", "siw0"), "iWARP"),
        (("usnic_0", "usp1s0"), "usNIC"),
        (("rdmap82s0", "efa_0"), "EFA"),
        (("cxi0", "hsn3", "hsi0"), "Slingshot"),
        (("mlx5_0", "rail0"), None),
    ],
)
def test_link_layers_of_names(names: tuple[str, ...], layer: str | None) -> None:
    assert {link_layer_of_name(name) for name in names} == {layer}


# NCCL's files


def test_merged_adapters_restrict_to_their_parts() -> None:
    parts = [switch(0x10 * i, gpu(0x10 * i + 1, i), infiniband(0x10 * i + 2, f"mlx5_{i}+mlx5_{i + 4}")) for i in (1, 2)]
    text = system(*parts).replace('dev="1" sm', 'dev="0" sm').replace('dev="2" sm', 'dev="1" sm')
    node_map = nccl.read(text, "f")
    assert variables(node_map, 2) == ("=mlx5_1,mlx5_5,mlx5_2,mlx5_6", ["mlx5_1:1,mlx5_5:1", "mlx5_2:1,mlx5_6:1"])


def test_a_merged_adapter_below_a_cpu() -> None:
    node_map = nccl.read(system(gpu(1, 0) + net("mlx5_0+mlx5_1", 200000), gpu(2, 1)), "f")
    assert [(a.name, a.numa) for a in node_map.adapters] == [("mlx5_0+mlx5_1", 0)]
    assert node_map.gpu_adapter == (("PHB",), ("SYS",))
    assert variables(node_map, 2) == (None, [None, None])
    both = nccl.read(system(gpu(1, 0) + infiniband(3, "mlx5_0") + infiniband(4, "mlx5_1") + net("mlx5_0+mlx5_1")), "f")
    assert [adapter.name for adapter in both.adapters] == ["mlx5_0", "mlx5_1"]


def test_data_direct_functions_are_their_adapters() -> None:
    dma = 'class="0x080100" vendor="0x15b3" device="0x2100"'
    parts = [switch(0x10 * i, gpu(0x10 * i + 1, i), pci(0x10 * i + 2, dma, net(f"rail{i}_dma"))) for i in (0, 1)]
    node_map = nccl.read(system(*parts), "f")
    assert variables(node_map, 2) == ("=rail0,rail1", ["rail0:1", "rail1:1"])
    twice = nccl.read(system(parts[0] + infiniband(0x40, "rail0"), parts[1]), "f")
    assert [adapter.name for adapter in twice.adapters] == ["rail0_dma", "rail1_dma"]


def test_adapters_for_sockets_are_no_adapters_with_rdma() -> None:
    interface = pci(3, 'class="0x020000" vendor="0x1ae0" device="0x0042"', net("eth1", 200000, port=0))
    node_map = nccl.read(system(gpu(1, 0) + interface), "f")
    assert node_map.adapters == ()
    assert ["RDMA" in warning for warning in node_map.warnings] == [True]


@pytest.mark.parametrize(
    ("identity", "name", "layer"),
    [
        (EFA, "rdmap{}s0", "EFA"),
        ('vendor="0x1d0f" device="0xefa3"', "efa_{}", "EFA"),
        (CASSINI, "cxi{}", "Slingshot"),
        ('vendor="0x1590" device="0x0371"', "hsn{}", "Slingshot"),
    ],
)
def test_adapters_behind_libfabric_train_and_are_not_restricted(identity: str, name: str, layer: str) -> None:
    parts = [switch(0x10 * i, gpu(0x10 * i + 1, i), ethernet(0x10 * i + 2, name.format(i), identity)) for i in (0, 1)]
    node_map = nccl.read(system(*parts), "f")
    assert [adapter.link_layer for adapter in node_map.fabric_adapters] == [layer] * 2
    assert [slot.adapter for slot in slots(node_map, 2)] == [name.format(0), name.format(1)]
    assert variables(node_map, 2) == (None, [None, None])
    assert node_map.warnings == ()


def test_roce_without_bonds_trains_beside_other_ethernet() -> None:
    """Two GPUs, each on a switch with an adapter of its own, and a third adapter for storage."""
    parts = [switch(0x10 * i, gpu(0x10 * i + 1, i), ethernet(0x10 * i + 2, f"mlx5_{i}")) for i in (0, 1)]
    node_map = nccl.read(system(parts[0] + ethernet(0x50, "mlx5_9", speed=25000), parts[1]), "f")
    assert variables(node_map, 2) == ("=mlx5_0,mlx5_1", ["mlx5_0:1", "mlx5_1:1"])
    bonded = nccl.read(system(parts[0] + ethernet(0x50, "mlx5_bond_0", speed=25000), parts[1]), "f")
    assert [adapter.name for adapter in bonded.fabric_adapters] == ["mlx5_0", "mlx5_1"]


def test_hosts_of_one_file(tmp_path: Path) -> None:
    one = system(gpu(1, 0) + infiniband(3, "mlx5_0"), host="0xa")
    other = one.replace("0xa", "0xb").replace('rank="0"', 'rank="1"')
    both = one.replace("</system>", "") + other.removeprefix('<system version="1">')
    node_map = nccl.read(both, "f")
    (warning,) = node_map.warnings
    assert len(node_map.gpus) == 1 and " 2 hosts" in warning and " 0xa " in warning
    file = tmp_path / "topo.xml"
    file.write_text(both.replace('class="0x020700"', 'class="0x020000"', 1).replace("mlx5_0", "eno1", 1))
    with refused("HT-node-file-not-valid", problem="of 2 hosts that differ: 0xa, 0xb"):
        read_node_map(file)


# hwloc's files


def test_slingshot_in_an_export_of_an_early_hwloc() -> None:
    """It lists the network interface only."""
    text = hwloc_export("2.0", [("12", "mlx5_0", 4, "0200", "17db:0501")])
    only = text.replace('name="ib12"', 'name="hsn0"').replace(
        'name="mlx5_0" osdev_type="3"', 'name="lo" osdev_type="2"'
    )
    assert [(a.name, a.link_layer) for a in hwloc.read(only, "f").fabric_adapters] == [("hsn0", "Slingshot")]


def test_an_export_without_cores_does_not_tell_threads() -> None:
    """Without cores the threads of one (0 and 2, 1 and 3) are one run of four CPUs; without threads too."""
    text = hwloc_export("2.0").replace('type="Core"', 'type="Group"')
    assert hwloc.read(text, "f").numa_nodes == (NumaNode(index=0, cores=(0, 1, 2, 3)),)
    bare = text.replace('type="PU"', 'type="Misc"')
    assert hwloc.read(bare, "f").numa_nodes == (NumaNode(index=0, cores=(0, 1, 2, 3)),)
    uneven = bare.replace('cpuset="0x0000000f" nodeset="0x1" gp_index="3"', 'cpuset="0x0000070f" nodeset="0x1"')
    assert hwloc.read(uneven, "f").numa_nodes == (NumaNode(index=0, cores=(), complete=False),)


# any map


CELLS = st.sampled_from(PCI_CLASSES)


@st.composite
def maps(draw: st.DrawFn, cells: st.SearchStrategy[str] = CELLS) -> NodeMap:
    """Hosts with any distances, whose nodes are listed whole or not, and whose GPUs are near one or nobody knows."""
    count, adapters, nodes = draw(st.integers(1, 6)), draw(st.integers(1, 6)), draw(st.integers(1, 3))
    widths = draw(st.lists(st.integers(0, 6), min_size=nodes, max_size=nodes))
    whole = draw(st.lists(st.booleans(), min_size=nodes, max_size=nodes))
    numa = st.none() | st.integers(0, nodes - 1)
    names = draw(st.sampled_from([["mlx5_{}"], ["rdmap{}s0", "mlx5_{}"], ["0000:{}:00.0", "mlx5_{}"]]))
    found = NodeMap(
        gpus=tuple(Gpu(index=i, bus_id=None, numa=draw(numa)) for i in range(count)),
        adapters=tuple(
            Adapter(
                name=(name := draw(st.sampled_from(names)).format(i)),
                bus_id=None,
                numa=None,
                link_layer=link_layer_of_name(name),
            )
            for i in range(adapters)
        ),
        numa_nodes=tuple(
            NumaNode(index=i, cores=tuple(range(10 * i, 10 * i + width)) if listed else (), complete=listed)
            for i, (width, listed) in enumerate(zip(widths, whole, strict=True))
        ),
        gpu_adapter=tuple(tuple(draw(cells) for _ in range(adapters)) for _ in range(count)),
    )
    return checked(found, "generated")


def placed_or_none(node_map: NodeMap) -> tuple[Slot, ...]:
    try:
        return slots(node_map, len(node_map.gpus))
    except HpctrainError:
        return ()


@given(maps())
def test_no_core_twice_and_none_that_the_map_does_not_list(node_map: NodeMap) -> None:
    placed = placed_or_none(node_map)
    used = [core for slot in placed for core in slot.cores]
    assert len(used) == len(set(used))
    assert set(used) <= {core for node in node_map.numa_nodes for core in node.cores}
    incomplete = {node.index for node in node_map.numa_nodes if not node.complete}
    for slot, each in zip(placed, node_map.gpus, strict=False):
        assert not (each.numa in incomplete and slot.cores)


@given(maps())
def test_a_restriction_names_devices_and_all_of_the_nearest(node_map: NodeMap) -> None:
    names = {adapter.name: adapter for adapter in node_map.adapters}
    for slot in placed_or_none(node_map):
        assert {names[device].link_layer for device in slot.devices} <= {None}
        each = node_map.gpus[slot.gpu or 0]
        assert not slot.devices or list(slot.devices) == [adapter.name for adapter in node_map.nearest(each)]
