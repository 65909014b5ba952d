"""Readers of one host: nvidia-smi topo -m, NCCL topology files, hwloc's XML."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from hpctrain.common.cluster.cores import cores_of_list, cores_of_mask, cores_of_nodes
from hpctrain.common.cluster.launch_files import host_variables
from hpctrain.common.cluster.node_map import NodeMap, NumaNode, slots
from hpctrain.common.errors import HpctrainError
from hpctrain.control.topology.live import this_node
from hpctrain.control.topology.node_file import read_node_map
from hpctrain.control.topology.readers import hwloc, nccl, nvidia_smi
from hpctrain.control.topology.readers.xml_tree import parse
from support.refusals import refused
from support.topology.node_texts import (
    GPUS_ONLY,
    LEGEND,
    NCCL_DUMP,
    NO_AFFINITY,
    WITH_ADAPTERS,
    hwloc_export,
    port_lid,
    with_bonds,
)

REAL = Path(__file__).parents[5] / "shared" / "data" / "nodes"
READERS = {"nvidia-smi": nvidia_smi.read, "NCCL": nccl.read, "hwloc": hwloc.read}


def _real(name: str) -> str:
    if not (REAL / name).exists():
        pytest.skip(f"{REAL / name} is not on this machine")
    return (REAL / name).read_text()


def _row(node_map: NodeMap, gpu: int) -> list[str]:
    return [node_map.distance(node_map.gpus[gpu], adapter) for adapter in node_map.adapters]


def test_nvidia_smi_with_adapters() -> None:
    node_map = nvidia_smi.read(WITH_ADAPTERS, "node.txt")
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
    (warning,) = node_map.warnings
    assert warning.endswith("(1): mlx5_bond_0 (Ethernet)")


def test_bonds_beside_virtual_functions_take_part() -> None:
    node_map = nvidia_smi.read(with_bonds(), "node.txt")
    assert [slot.adapter for slot in slots(node_map, 8)] == [f"mlx5_bond_{number}" for number in range(1, 9)]
    assert host_variables(slots(node_map, 2))["NCCL_IB_HCA"] == "=mlx5_bond_1,mlx5_bond_2"
    [warning] = node_map.warnings
    assert "(34): mlx5_0 " in warning


@pytest.mark.parametrize("cut", ["m", "mlx", "mlx5_", "mlx5_1"])
def test_a_legend_cut_within_a_name_is_an_error(cut: str) -> None:
    text = WITH_ADAPTERS[: WITH_ADAPTERS.index("mlx5_bond_0")] + cut
    with refused("HT-node-file-not-valid", where="node.txt:24", part="NIC2"):
        nvidia_smi.read(text, "node.txt")
    assert nvidia_smi.read(WITH_ADAPTERS + "user@node:~$ ", "node.txt") == nvidia_smi.read(WITH_ADAPTERS, "node.txt")


def test_bonds_that_are_no_nearer_are_for_storage() -> None:
    node_map = nvidia_smi.read(with_bonds(8, "PIX"), "node.txt")
    assert [adapter.name for adapter in node_map.fabric_adapters] == [f"mlx5_{number}" for number in range(8)]


def test_nvidia_smi_of_gpus_alone() -> None:
    node_map = nvidia_smi.read(GPUS_ONLY, "node.txt")
    assert node_map.adapters == ()
    assert [slot.cores for slot in slots(node_map, 2)] == [(0, 1), (2, 3)]
    bare = nvidia_smi.read(NO_AFFINITY, "node.txt")
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
    node_map = nvidia_smi.read(text, "node.txt")
    assert node_map.gpus[0].numa == numa
    assert sum(len(node.cores) for node in node_map.numa_nodes) == cores


@pytest.mark.parametrize("before", ["Warning: Permanently added n1\n", "0: ", "n1:~$ lstopo --of xml\n", "\n"])
@pytest.mark.parametrize("text", [hwloc_export("2.0"), NCCL_DUMP])
def test_xml_in_a_log(tmp_path: Path, before: str, text: str) -> None:
    (tmp_path / "plain").write_text(text)
    wanted = read_node_map(tmp_path / "plain")
    lines = text.splitlines(keepends=True)
    prefixed = "".join(before + line for line in lines) if before == "0: " else before + text
    for content in (prefixed.encode(), (prefixed + "0: n1:~$ \n").encode()):
        (tmp_path / "log").write_bytes(content)
        found = read_node_map(tmp_path / "log")
        assert (found.gpus, found.adapters, found.numa_nodes) == (wanted.gpus, wanted.adapters, wanted.numa_nodes)


def test_nccl_dump() -> None:
    node_map = nccl.read(NCCL_DUMP, "topo.xml")
    assert [(gpu.index, gpu.bus_id, gpu.numa) for gpu in node_map.gpus] == [
        (0, "0000:b8:00.0", 1),
        (1, "0000:18:00.0", 0),
    ]
    # Two direct, and the lesser of 8 and 3 by switches; the 9 to a POWER9 do not count.
    assert [(a.name, a.link_layer) for a in node_map.adapters] == [("mlx5_0", "InfiniBand"), ("mlx5_1", "Ethernet")]
    assert node_map.gpu_adapter == (("SYS", "SYS"), ("PXB", "PHB"))
    assert [node.cores for node in node_map.numa_nodes] == [(0, 1, 2, 3), (4, 5, 6, 7)]


@pytest.mark.parametrize(
    ("attributes", "layer", "virtual"),
    [
        ('class="0x0c0600" vendor="0x15b3" device="0x673c"', "InfiniBand", False),
        ('class="0x020800" vendor="0x8086" device="0x24f0"', "InfiniBand", False),
        ('class="0x028000" vendor="0x15b3" device="0x1003"', None, False),
        ('class="0x020000" vendor="0x15b3" device="0x1021"', "Ethernet", False),
        ('class="0x020700" vendor="0x15b3" device="0x101e"', "InfiniBand", True),
    ],
)
def test_nccl_kinds_of_adapters(attributes: str, layer: str | None, virtual: bool) -> None:
    text = NCCL_DUMP.replace('class="0x020700" vendor="0x15b3"', attributes)
    [adapter] = [each for each in nccl.read(text, "topo.xml").adapters if each.name == "mlx5_0"]
    assert (adapter.link_layer, adapter.virtual) == (layer, virtual)


@pytest.mark.parametrize("version", ["2.0", "3.0"])
def test_hwloc_export(version: str) -> None:
    node_map = hwloc.read(hwloc_export(version), "node.xml")
    [gpu] = node_map.gpus
    assert (gpu.index, gpu.bus_id, gpu.numa) == (0, "0000:15:00.0", 0)
    assert [(a.name, a.link_layer, a.active) for a in node_map.adapters] == [
        ("mlx5_0", "InfiniBand", True),
        ("mlx5_1", "InfiniBand", False),
        ("mlx5_2", "Ethernet", True),
    ]
    assert node_map.gpu_adapter == (("PIX", "PIX", "PIX"),)
    assert node_map.numa_nodes == (NumaNode(index=0, cores=(0, 1)),)
    assert slots(node_map, 1)[0].adapter == "mlx5_0"


@pytest.mark.parametrize(
    ("pci_class", "state", "infos", "layer"),
    [
        # ConnectX-2 and TrueScale, ConnectX-3, Omni-Path: a LID tells, whatever the class.
        ("0c06", 4, port_lid(0x63), "InfiniBand"),
        ("0280", 4, port_lid(7), "InfiniBand"),
        ("0208", 4, port_lid(7), "InfiniBand"),
        ("0200", 4, port_lid(7), "InfiniBand"),
        # The same adapters with their ports set to Ethernet.
        ("0c06", 4, port_lid(0), "Ethernet"),
        ("0280", 4, port_lid(0), "Ethernet"),
        ("0200", 1, port_lid(0), "Ethernet"),
        # Nothing is plugged in.
        ("0c06", 1, port_lid(0), "InfiniBand"),
        ("0280", 1, port_lid(0), None),
        ("0207", 1, port_lid(0), "InfiniBand"),
        # One port of each kind.
        ("0280", 4, port_lid(0) + port_lid(7, 2) + '<info name="Port2State" value="4"/>', "InfiniBand"),
    ],
)
def test_hwloc_link_layer_by_lid_and_class(pci_class: str, state: int, infos: str, layer: str | None) -> None:
    adapter = ("12", "mlx4_0", state, pci_class, "15b3:1003", infos)
    node_map = hwloc.read(hwloc_export("2.0", [adapter]), "node.xml")
    assert [(a.link_layer, a.active) for a in node_map.adapters] == [(layer, state == 4)]
    assert len(node_map.fabric_adapters) == (layer is not None and state == 4)


def test_virtual_functions_take_no_part_beside_the_whole() -> None:
    virtual = [(f"{bus:02x}", f"mlx5_{bus}", 4, "0200", "15b3:101e", port_lid(0)) for bus in range(0x20, 0x42)]
    bond = ("13", "mlx5_bond_1", 4, "0200", "15b3:1021", port_lid(0))
    node_map = hwloc.read(hwloc_export("2.0", [*virtual, bond]), "node.xml")
    assert [adapter.name for adapter in node_map.fabric_adapters] == ["mlx5_bond_1"]
    assert slots(node_map, 1)[0].adapter == "mlx5_bond_1"
    [warning] = node_map.warnings
    assert "(34)" in warning
    # A virtual machine that rents InfiniBand has nothing else.
    rented = [("12", "mlx5_0", 4, "0207", "15b3:101e", port_lid(9))]
    assert slots(hwloc.read(hwloc_export("2.0", rented), "node.xml"), 1)[0].adapter == "mlx5_0"


def test_hwloc_inside_a_job_of_one_core_says_so() -> None:
    text = hwloc_export("2.0").replace('cpuset="0x0000000f"', 'cpuset="0x0000000f" complete_cpuset="0xffffffff"', 2)
    [warning] = [each for each in hwloc.read(text, "node.xml").warnings if "CPUs" in each]
    assert warning.startswith("node.xml: ") and re.findall(" ([0-9]+) ", warning)[:2] == ["4", "32"]
    same = text.replace("0xffffffff", "0x0000000f")
    assert not [each for each in hwloc.read(same, "node.xml").warnings if "CPUs" in each]
    # Memory that a job may not use either, with all that is beside it.
    other = hwloc_export("2.0").replace('nodeset="0x1" gp', 'nodeset="0x1" complete_nodeset="0x3" gp', 1)
    assert [each for each in hwloc.read(other, "node.xml").warnings if "CPUs" in each]


def test_hwloc_with_hyper_threading_off_has_all_cores() -> None:
    text = hwloc_export("2.0").replace('cpuset="0x0000000f"', 'cpuset="0x0000000f" complete_cpuset="0x000000ff"', 1)
    # A machine's only memory may count what is offline as well.
    memory = text.replace('"NUMANode" os_index="0"', '"NUMANode" os_index="0" complete_cpuset="0x000000ff"')
    for each in (text, memory):
        assert not [warning for warning in hwloc.read(each, "node.xml").warnings if "CPUs" in warning]


@pytest.mark.parametrize("kind", ["0302", "0380", "1200"])
@pytest.mark.parametrize("version", ["2.0", "3.0"])
def test_hwloc_gpus_of_amd(kind: str, version: str) -> None:
    gpu = "0302 [10de:20b0] [10de:144e] a1"
    text = hwloc_export(version).replace(gpu, f"{kind} [1002:74a1] [1002:74a1] 00")
    [found] = hwloc.read(text, "node.xml").gpus
    assert (found.index, found.bus_id, found.numa) == (0, "0000:15:00.0", 0)
    # The driver's own number, where hwloc was built with it.
    numbered = '00"><object type="OSDev" name="rsmi3" osdev_type="5"/></object>'
    assert hwloc.read(text.replace('74a1] 00"/>', f"74a1] {numbered}"), "node.xml").gpus[0].index == 3
    # What a processor of AMD's has for its display.
    assert not hwloc.read(text.replace(f"{kind} [1002", "0300 [1002"), "node.xml").gpus


@pytest.mark.parametrize(
    ("name", "layer"), [("usnic_0", "usNIC"), ("usp18s0", "usNIC"), ("cxgb4_0", "iWARP"), ("iwp18s0", "iWARP")]
)
def test_adapters_that_nccl_does_not_use(name: str, layer: str) -> None:
    other = ("12", name, 4, "0200", "1137:0043", port_lid(0))
    node_map = hwloc.read(hwloc_export("2.0", [other]), "node.xml")
    assert [adapter.link_layer for adapter in node_map.adapters] == [layer]
    assert node_map.fabric_adapters == () and "NCCL_IB_HCA" not in host_variables(slots(node_map, 1))
    assert f"{name} ({layer})" in node_map.warnings[0]
    beside = hwloc.read(hwloc_export("2.0", [other, ("13", "mlx5_0", 4, "0200", "15b3:1021", port_lid(0))]), "node.xml")
    assert host_variables(slots(beside, 1))["NCCL_IB_HCA"] == "=mlx5_0"


def test_hwloc_device_near_two_numa_nodes_is_on_none() -> None:
    far = '<object type="NUMANode" os_index="1" cpuset="0x00000010" nodeset="0x2"/><object type="PU" os_index="4"'
    text = hwloc_export("2.0").replace(
        'nodeset="0x1" gp_index="2">', 'nodeset="0x3" gp_index="2">' + far + ' cpuset="0x10"/>'
    )
    text = text.replace('type="Core"', 'type="Group"')
    node_map = hwloc.read(text, "node.xml")
    assert [node.cores for node in node_map.numa_nodes] == [(0, 1, 2, 3), (4,)]
    assert [device.numa for device in (*node_map.gpus, *node_map.adapters)] == [None] * 4
    assert node_map.gpu_adapter == (("PIX", "PIX", "PIX"),)
    # A node without cores is the memory of a GPU.
    alone = hwloc.read(text.replace('cpuset="0x00000010"', 'cpuset="0x0"'), "node.xml")
    assert [device.numa for device in (*alone.gpus, *alone.adapters)] == [0] * 4


def test_hwloc_cores_with_two_memories_belong_to_the_first() -> None:
    memory = '<object type="NUMANode" os_index="{}" cpuset="{}" nodeset="{}"/>'
    threads = "".join(f'<object type="PU" os_index="{cpu}" cpuset="{1 << cpu:#x}"/>' for cpu in range(4))
    memories = [(2, "0x3", "0x4"), (0, "0x3", "0x1"), (1, "0xc", "0x2"), (3, "0xf", "0x8")]
    text = "".join(memory.format(*each) for each in memories)
    node_map = hwloc.read(f'<topology version="2.0">{text}{threads}</topology>', "node.xml")
    assert [(node.index, node.cores) for node in node_map.numa_nodes] == [(0, (0, 1)), (1, (2, 3)), (2, ()), (3, ())]
    assert [slot.cores for slot in slots(node_map, 2)] == [(0, 1), (2, 3)]


def _lstopo(*arguments: str) -> str:
    program = shutil.which("lstopo")
    if program is None:
        pytest.skip("no lstopo: apt-get install hwloc-nox")
    return subprocess.run([program, *arguments, "--of", "xml"], capture_output=True, text=True, check=True).stdout


def test_the_real_lstopo_and_the_kernel_agree_on_this_machine() -> None:
    here = this_node()
    cores = {core for node in here.numa_nodes for core in node.cores}
    exported = hwloc.read(_lstopo(), "lstopo")
    assert {core for node in exported.numa_nodes for core in node.cores} >= cores
    assert [gpu.bus_id for gpu in exported.gpus] == [gpu.bus_id for gpu in here.gpus]
    assert [adapter.name for adapter in exported.adapters] == [adapter.name for adapter in here.adapters]


INVALID, NO_LIST = "HT-node-file-not-valid", "HT-cores-not-a-list"
HWLOC, SMI = hwloc_export("2.0"), WITH_ADAPTERS


def between(value: str, other: str) -> dict[str, object]:
    return {"where": "node:2", "value": value, "row": "GPU0", "column": other}


REFUSED = [
    (nvidia_smi.read, SMI[: SMI.index("NIC2\tNODE")], INVALID, {"where": "node:1", "part": "NIC2"}),
    (nvidia_smi.read, SMI[: SMI.index("  NIC2:")], INVALID, {"where": "node:1", "part": "NIC2"}),
    (nvidia_smi.read, SMI[: SMI.index("\tSYS\tPIX\tSYS\t8-15")], INVALID, {"where": "node:4", "part": "GPU2"}),
    (nvidia_smi.read, SMI.replace("PXB\tSYS\tNODE", "OK\tSYS\tNODE"), INVALID, between("OK", "NIC0")),
    (nvidia_smi.read, SMI.replace("PXB\tSYS\tNODE", "NV2\tSYS\tNODE"), INVALID, between("NV2", "NIC0")),
    (nvidia_smi.read, SMI.replace(" X \tNV4\tNV4", "NV4\tNV4\tNV4"), INVALID, between("NV4", "GPU0")),
    (nvidia_smi.read, SMI.replace("0-7,16-23", "0-7,oops"), NO_LIST, {"where": "node:2", "text": "0-7,oops"}),
    # Two places of one name.
    (nvidia_smi.read, SMI.replace("NIC1: mlx5_10", "NIC1: mlx5_0"), INVALID, {"name": "mlx5_0", "count": 2}),
    (nvidia_smi.read, SMI + SMI, INVALID, {"where": "node:25", "part": "GPU0"}),
    (nvidia_smi.read, LEGEND, INVALID, {"where": "node"}),
    (nvidia_smi.read, NCCL_DUMP, INVALID, {"where": "node"}),
    (nvidia_smi.read, "", INVALID, {"where": "node"}),
    (nccl.read, NCCL_DUMP[:900], INVALID, {"where": "node:15"}),
    (nccl.read, NCCL_DUMP.replace('numaid="1"', 'numaid="one"'), INVALID, {"where": "node"}),
    (nccl.read, NCCL_DUMP.replace("00f000f0", "cores"), NO_LIST, {"where": "node", "text": "00000000,cores"}),
    (nccl.read, '<system version="1"><cpu numaid="0"/></system>', INVALID, {"where": "node"}),
    (nccl.read, HWLOC, INVALID, {"where": "node", "problem": "expected <system>, found <topology>"}),
    (nccl.read, "", INVALID, {"where": "node:1"}),
    (hwloc.read, HWLOC.replace('version="2.0"', ""), INVALID, {"problem": "hwloc XML of version 1, not 2 or 3"}),
    (hwloc.read, HWLOC[:1500], INVALID, {"where": "node:18"}),
    (hwloc.read, HWLOC.replace("NUMANode", "Misc"), INVALID, {"where": "node"}),
    (hwloc.read, HWLOC.replace('cpuset="0x0000000f"', 'cpuset="0xf...f"'), NO_LIST, {"where": "node"}),
    (hwloc.read, NCCL_DUMP, INVALID, {"where": "node"}),
    (hwloc.read, "\x00\x01PNG", INVALID, {"where": "node:1"}),
]


@pytest.mark.parametrize(("read", "text", "code", "values"), REFUSED)
def test_files_that_do_not_fit(
    read: Callable[[str, str], NodeMap], text: str, code: str, values: dict[str, object]
) -> None:
    with refused(code, **values):
        read(text, "node")


@pytest.mark.parametrize("read", READERS.values(), ids=READERS)
def test_entities_are_refused(read: object) -> None:
    """A billion laughs in nine lines must not be expanded."""
    laughs = "".join(f'<!ENTITY l{i} "{f"&l{i - 1};" * 10 if i else "lol"}">' for i in range(9))
    for root in ("system", "topology"):
        with pytest.raises(HpctrainError):
            read(f"<!DOCTYPE {root} [{laughs}]><{root}>&l8;</{root}>", "bomb.xml")  # type: ignore[operator]
    with refused("HT-node-file-not-valid", where="bomb.xml:1"):
        nccl.read(f"<!DOCTYPE system [{laughs}]><system>&l8;</system>", "bomb.xml")


def test_a_text_is_read_whatever_encoding_it_names() -> None:
    """It was decoded already, and Python has no reader of some of these names."""
    for encoding in ("UTF-16", "GB2312", "FOO"):
        text = f'<?xml version="1.0" encoding="{encoding}"?>\n<system name="é"/>'
        assert parse(text, "node", root="system", remedy="").get("name") == "é"


def test_azure_ndv4() -> None:
    """8 A100 and 8 adapters, two of each on a switch of one of four NUMA nodes with 24 cores."""
    node_map = nccl.read(_real("azure-ndv4.nccl-topo.xml"), "ndv4")
    assert (len(node_map.gpus), len(node_map.fabric_adapters), len(node_map.numa_nodes)) == (8, 8, 4)
    assert [len(node.cores) for node in node_map.numa_nodes] == [24] * 4
    assert [gpu.numa for gpu in node_map.gpus] == [1, 1, 0, 0, 3, 3, 2, 2]
    assert Counter(_row(node_map, 0)) == {"PIX": 2, "SYS": 6}
    placed = slots(node_map, 8)
    assert [slot.adapter for slot in placed] == [f"010{i}:00:00.0" for i in range(1, 9)]
    assert [len(slot.cores) for slot in placed] == [12] * 8
    (warning,) = node_map.warnings
    assert warning.startswith("ndv4: 8 ")


def test_dgx2() -> None:
    """16 V100; the export was cut to 4 cores and holds no adapter."""
    node_map = hwloc.read(_real("nvidia-dgx2.hwloc.xml"), "dgx2")
    assert (len(node_map.gpus), len(node_map.adapters)) == (16, 0)
    assert [gpu.numa for gpu in node_map.gpus] == [0] * 8 + [1] * 8
    assert [node.cores for node in node_map.numa_nodes] == [(0, 1), (24, 25)]
    with refused("HT-ranks-too-many", ranks=16, cores=4):
        slots(node_map, 16)


def test_cpu_lists_and_masks() -> None:
    assert cores_of_list("0-2,5\n", "x") == (0, 1, 2, 5)
    assert cores_of_list("", "x") == ()
    assert cores_of_mask("0x00000001,,0x80000001", "x") == (0, 31, 64)
    assert cores_of_mask("0000ffff", "x") == tuple(range(16))
    assert cores_of_mask("0x8000000000000001", "x") == (0, 63)
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
