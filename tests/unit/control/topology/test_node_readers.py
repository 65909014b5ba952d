"""What is read of one host: the output of nvidia-smi topo -m, and lists of CPUs."""

from __future__ import annotations

import pytest

from hpctrain.common.cluster.cores import cores_of_list, cores_of_nodes
from hpctrain.common.cluster.launch_files import host_variables
from hpctrain.common.cluster.node_map import NodeMap, NumaNode, slots
from hpctrain.control.topology import node_file
from support.refusals import refused
from support.topology.node_texts import (
    GPUS_ONLY,
    LEGEND,
    NO_AFFINITY,
    WITH_ADAPTERS,
    with_bonds,
)


def _row(node_map: NodeMap, gpu: int) -> list[str]:
    return [node_map.distance(node_map.gpus[gpu], adapter) for adapter in node_map.adapters]


def test_nvidia_smi_with_adapters() -> None:
    node_map = node_file.read(WITH_ADAPTERS, "node.txt")
    assert [adapter.name for adapter in node_map.adapters] == ["mlx5_0", "mlx5_10", "mlx5_bond_0"]
    assert [adapter.numa for adapter in node_map.adapters] == [0, 1, 0]
    assert [_row(node_map, gpu) for gpu in range(4)] == [
        ["PXB", "SYS", "NODE"],
        ["PIX", "SYS", "NODE"],
        ["SYS", "PIX", "SYS"],
        ["SYS", "PXB", "SYS"],
    ]
    # 16-23 and 24-31 are the second threads of the same cores.
    assert node_map.numa_nodes == (
        NumaNode(index=0, cores=tuple(range(8))),
        NumaNode(index=1, cores=tuple(range(8, 16))),
    )
    assert [(slot.adapter, slot.cores) for slot in slots(node_map, 4)] == [
        ("mlx5_0", (0, 1, 2, 3)),
        ("mlx5_0", (4, 5, 6, 7)),
        ("mlx5_10", (8, 9, 10, 11)),
        ("mlx5_10", (12, 13, 14, 15)),
    ]
    assert [warning.split()[1:4:2] for warning in node_map.warnings] == [["mlx5_bond_0", "Ethernet:"]]


def test_bonds_beside_virtual_functions_take_part() -> None:
    node_map = node_file.read(with_bonds(), "node.txt")
    assert [slot.adapter for slot in slots(node_map, 8)] == [f"mlx5_bond_{number}" for number in range(1, 9)]
    assert host_variables(slots(node_map, 2))["NCCL_IB_HCA"] == "=mlx5_bond_1,mlx5_bond_2"
    [warning] = node_map.warnings
    assert "(34): mlx5_0," in warning


@pytest.mark.parametrize("cut", ["m", "mlx", "mlx5_", "mlx5_1"])
def test_a_legend_cut_within_a_name_is_an_error(cut: str) -> None:
    text = WITH_ADAPTERS[: WITH_ADAPTERS.index("mlx5_bond_0")] + cut
    with refused("HT-node-file-not-valid", where="node.txt:24", part="NIC2"):
        node_file.read(text, "node.txt")
    assert node_file.read(WITH_ADAPTERS + "user@node:~$ ", "node.txt") == node_file.read(WITH_ADAPTERS, "node.txt")


def test_bonds_that_are_no_nearer_are_for_storage() -> None:
    node_map = node_file.read(with_bonds(8, "PIX"), "node.txt")
    assert [adapter.name for adapter in node_map.fabric_adapters] == [f"mlx5_{number}" for number in range(8)]


def test_nvidia_smi_of_gpus_alone() -> None:
    node_map = node_file.read(GPUS_ONLY, "node.txt")
    assert node_map.adapters == ()
    assert [slot.cores for slot in slots(node_map, 2)] == [(0, 1), (2, 3)]
    bare = node_file.read(NO_AFFINITY, "node.txt")
    assert [slot.cores for slot in slots(bare, 2)] == [(), ()]


@pytest.mark.parametrize(
    ("affinities", "numa", "cores"),
    [
        ("0-71\t0,3-9\t\tN/A", 0, 72),
        ("0-71\tN/A\t\tN/A", -1, 72),
        # With a blank cell, nothing shows of which columns the others are.
        ("0-71\t\t\tN/A", None, 0),
        ("N/A\tN/A\t\tN/A", None, 0),
    ],
)
def test_nvidia_smi_with_blank_affinities(affinities: str, numa: int | None, cores: int) -> None:
    text = f"\tGPU0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\nGPU0\t X \t{affinities}\n"
    node_map = node_file.read(text, "node.txt")
    assert node_map.gpus[0].numa == numa
    assert sum(len(node.cores) for node in node_map.numa_nodes) == cores


INVALID, NO_LIST = "HT-node-file-not-valid", "HT-cores-not-a-list"
SMI = WITH_ADAPTERS


def between(value: str, other: str) -> dict[str, object]:
    return {"where": "node:2", "value": value, "row": "GPU0", "column": other}


REFUSED = [
    (SMI[: SMI.index("NIC2\tNODE")], INVALID, {"where": "node:1", "part": "NIC2"}),
    (SMI[: SMI.index("  NIC2:")], INVALID, {"where": "node:1", "part": "NIC2"}),
    (SMI[: SMI.index("\tSYS\tPIX\tSYS\t8-15")], INVALID, {"where": "node:4", "part": "GPU2"}),
    (SMI.replace("PXB\tSYS\tNODE", "OK\tSYS\tNODE"), INVALID, between("OK", "NIC0")),
    (SMI.replace("PXB\tSYS\tNODE", "NV2\tSYS\tNODE"), INVALID, between("NV2", "NIC0")),
    (SMI.replace(" X \tNV4\tNV4", "NV4\tNV4\tNV4"), INVALID, between("NV4", "GPU0")),
    (SMI.replace("0-7,16-23", "0-7,oops"), NO_LIST, {"where": "node:2", "text": "0-7,oops"}),
    # Two places of one name.
    (SMI.replace("NIC1: mlx5_10", "NIC1: mlx5_0"), INVALID, {"name": "mlx5_0", "count": 2}),
    (SMI + SMI, INVALID, {"where": "node:25", "part": "GPU0"}),
    (LEGEND, INVALID, {"where": "node"}),
    ("<topology/>", INVALID, {"where": "node"}),
    ("", INVALID, {"where": "node"}),
]


@pytest.mark.parametrize(("text", "code", "values"), REFUSED)
def test_files_that_do_not_fit(text: str, code: str, values: dict[str, object]) -> None:
    with refused(code, **values):
        node_file.read(text, "node")


def test_cpu_lists() -> None:
    assert cores_of_list("0-2,5\n", "x") == (0, 1, 2, 5)
    assert cores_of_list("", "x") == ()
    for wrong in ("3-1", "a", "0-99999999", "1--2", "-1"):
        with refused("HT-cores-not-a-list", where="x", text=wrong):
            cores_of_list(wrong, "x")


@pytest.mark.parametrize(
    ("nodes", "cores"),
    [
        ([(0, 1, 4, 5), (2, 3, 6, 7)], [(0, 1), (2, 3)]),
        ([(0, 1, 2, 3)], [(0, 1, 2, 3)]),
        ([(0, 2)], [(0,)]),
        # Every second CPU, of which the second half may be second threads; unequal runs; four runs.
        ([(0, 2, 4, 6), (1, 3, 5, 7)], [None, None]),
        ([(0, 1, 2, 3, 8, 9, 10)], [None]),
        ([(0, 1, 4, 5, 8, 9, 12, 13)], [None]),
        # Runs that cannot be threads: those of the third node would begin before the second ones end.
        ([(0, 1, 4, 5), (2, 3, 6, 7), (8, 9, 12, 13)], [None, None, None]),
        # One CPU in two nodes.
        ([(0, 1, 2, 3), (3, 4)], [None, None]),
        ([()], [()]),
    ],
)
def test_which_cpus_are_cores(nodes: list[tuple[int, ...]], cores: list[tuple[int, ...] | None]) -> None:
    assert cores_of_nodes(nodes) == cores
