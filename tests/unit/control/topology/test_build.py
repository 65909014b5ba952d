"""Records to fabric: order, levels, subnets, oversubscription, and a warning for all that is odd."""

from __future__ import annotations

import random
import re
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpctrain.control.topology.build import build_fabric, read_fabric
from hpctrain.control.topology.fabric import NO_PORT, Fabric
from hpctrain.control.topology.names import host_and_device, is_service_host, natural_key, switch_name
from hpctrain.control.topology.readers import forwarding, ibnetdiscover
from hpctrain.control.topology.records import FabricNode, Link, Record, Remark, SwitchGroup, bandwidth
from hpctrain.control.topology.summary import counts, leaf_oversubscription
from support.golden import check_text
from support.refusals import refused
from support.topology.infiniband_texts import DUMP_LFTS, IBNETDISCOVER


class Plant:
    """Nodes and cables laid by hand; ``records`` is what a reader would tell of them."""

    def __init__(self) -> None:
        self.records: list[Record] = []
        self._ports: dict[str, int] = {}

    def switch(self, name: str, *, guid: str = "") -> str:
        guid = guid or f"{len(self._ports) + 1:016x}"
        self._ports[guid] = 0
        lid = len(self._ports)
        self.records.append(FabricNode(kind="switch", guid=guid, name=name, lid=lid, where="f:1"))
        return guid

    def adapter(self, name: str, *switches: str, speed: str = "NDR", device: int = 0x1021) -> str:
        guid = f"{0xA000 + len(self._ports):016x}"
        self._ports[guid] = 0
        self.records.append(FabricNode(kind="adapter", guid=guid, name=name, device_id=device, where="f:1"))
        for switch in switches:
            self.cable(guid, switch, speed)
        return guid

    def cable(self, one: str, other: str, speed: str | None = "NDR", *, sides: int = 2) -> None:
        ends = (one, self._port(one)), (other, self._port(other))
        for (guid, port), (peer, peer_port) in (ends, ends[::-1])[:sides]:
            link = Link(guid=guid, port=port, peer=peer, peer_port=peer_port, width=4, speed=speed, where="f:1")
            self.records.append(link)

    def _port(self, guid: str) -> int:
        self._ports[guid] += 1
        return self._ports[guid]

    def build(self) -> Fabric:
        return build_fabric(self.records)


def _level(fabric: Fabric, name: str) -> int:
    return int(fabric.level[fabric.names.index(name)])


def _two_leaves() -> tuple[Plant, str, str, str]:
    plant = Plant()
    spine, one, two = plant.switch("spine"), plant.switch("leaf10"), plant.switch("leaf9")
    plant.cable(one, spine)
    plant.cable(two, spine)
    for number in (10, 9, 1):
        plant.adapter(f"n{number} mlx5_10", one)
        plant.adapter(f"n{number} mlx5_2", two)
    return plant, spine, one, two


@settings(max_examples=50, deadline=None)
@given(st.randoms(use_true_random=False))
def test_the_order_of_discovery_does_not_matter(chosen: random.Random) -> None:
    plant, *_ = _two_leaves()
    fabric = plant.build()
    chosen.shuffle(plant.records)
    other = plant.build()
    assert other.names == fabric.names
    assert other.names[:3] == ("leaf9", "leaf10", "spine")
    assert other.hosts == fabric.hosts == ("n1", "n9", "n10")
    assert [fabric.names[adapter] for adapter in fabric.adapters(2)] == ["n10 mlx5_2", "n10 mlx5_10"]
    for made in (fabric, other):
        assert made.level.tolist() == [1, 1, 2] + [0] * 6
        assert made.leaves[0] == {0, 1}
        assert made.warnings == ()
    assert set(zip(fabric.source.tolist(), fabric.target.tolist(), strict=True)) == set(
        zip(other.source.tolist(), other.target.tolist(), strict=True)
    )


def test_aggregation_nodes_take_no_part_and_make_no_leaf() -> None:
    plant, spine, *_ = _two_leaves()
    plant.adapter("Mellanox Technologies Aggregation Node", spine)
    plant.adapter("n4 mlx5_0", spine, device=0xCF09)
    fabric = plant.build()
    assert _level(fabric, "spine") == 2
    assert fabric.hosts == ("n1", "n9", "n10")
    assert (fabric.level >= 0).all() and len(fabric.source) == 2 * 8
    assert [warning.split()[:2] for warning in fabric.warnings] == [["2", "SHARP"]]


def test_a_management_host_on_a_spine_makes_no_leaf_of_it_but_a_storage_leaf_is_one() -> None:
    plant, spine, *_ = _two_leaves()
    plant.adapter("dc1-ufm01 mlx5_0", spine)
    storage = plant.switch("storage-leaf")
    plant.cable(storage, spine)
    plant.adapter("oss1 mlx5_0", storage)
    fabric = plant.build()
    assert _level(fabric, "spine") == 2
    assert _level(fabric, "storage-leaf") == 1
    # One can be named for a run, and is not counted or chosen for it.
    assert "dc1-ufm01" in fabric.hosts and counts(fabric)["hosts"] == 4
    assert (fabric.level == 0).sum() == 8
    assert any("manage" in warning and "dc1-ufm01" in warning for warning in fabric.warnings)


def test_odd_cables_are_warnings() -> None:
    plant, _, one, two = _two_leaves()
    plant.cable(one, one)
    plant.cable(one, two, sides=1)
    plant.adapter("n9 mlx5_3", one, speed="HDR")
    plant.records += [
        Link(guid=one, port=60, where="f:1"),
        Link(guid=one, port=61, peer=two, peer_port=1, where="f:1"),
        Link(guid=one, port=62, peer="f" * 16, peer_port=1, where="f:1"),
        FabricNode(kind="adapter", guid="e" * 16, name="n5 mlx5_0", where="f:1"),
        Remark(text="odd", where="f:9"),
        Remark(text="odd", where="g:9"),
    ]
    fabric = plant.build()
    check_text("fabric-odd-cables", "\n".join(fabric.warnings))
    between = (fabric.source == 0) & (fabric.target == 1)
    assert between.sum() == 1, "the one-sided cable carries traffic both ways"
    assert ((fabric.source == 1) & (fabric.target == 0)).sum() == 1


def test_names_that_do_not_tell_nodes_apart() -> None:
    plant = Plant()
    one, two = plant.switch("Quantum Mellanox Technologies"), plant.switch("Quantum Mellanox Technologies")
    plant.cable(one, two)
    nameless = plant.adapter("MT4129 ConnectX7   Mellanox Technologies", one)
    plant.adapter("localhost mlx5_0", one)
    two_ports = plant.adapter("n1 mlx5_0", one, two)
    fabric = plant.build()
    chip = "Quantum Mellanox Technologies"
    assert fabric.names[:2] == (f"{chip} {one}", f"{chip} {two}")
    assert fabric.hosts == (nameless, "localhost", "n1")
    assert [fabric.names[adapter] for adapter in fabric.adapters(2)] == ["n1 mlx5_0/1", "n1 mlx5_0/2"]
    assert two_ports not in fabric.hosts
    assert fabric.leaves[2] == {0, 1}
    assert len(fabric.warnings) == 3


def test_subnets_are_kept_apart() -> None:
    plant, *_ = _two_leaves()
    chain = [plant.switch(f"x{number}") for number in range(30)]
    for one, other in pairwise(chain):
        plant.cable(one, other)
    plant.adapter("n77 mlx5_0", chain[-1])
    fabric = plant.build()
    assert fabric.subnet.max() == 1
    apart = {fabric.names[node] for node in np.flatnonzero(fabric.subnet == fabric.subnet[-1])}
    assert apart == {"n77 mlx5_0", *(f"x{number}" for number in range(30))}
    (warning,) = fabric.warnings
    assert re.findall("[0-9]+", warning) == ["29", "0", "1", "2", "26"]


def test_oversubscription_counts_bandwidth() -> None:
    plant, spine, one, _ = _two_leaves()
    plant.cable(one, spine, "HDR")
    assert leaf_oversubscription(plant.build()) == {"leaf9": 3.0, "leaf10": 2.0}
    plant, _, one, two = _two_leaves()
    plant.cable(one, two)
    assert leaf_oversubscription(plant.build()) == {"leaf9": 1.5, "leaf10": 1.5}


def test_links_of_unknown_speed() -> None:
    plant, *_ = _two_leaves()
    switch = plant.switch("x")
    plant.cable(switch, plant.records[0].guid, None)  # type: ignore[union-attr]
    fabric = plant.build()
    assert set(fabric.bandwidth) == {50e9}
    assert any(warning.startswith("1 links") for warning in fabric.warnings)


def test_nothing_to_place_ranks_on_is_an_error() -> None:
    with refused("HT-fabric-no-hosts", found="no channel adapter"):
        build_fabric([])
    plant = Plant()
    plant.cable(plant.switch("a"), plant.switch("b"))
    with refused("HT-fabric-no-hosts", found="no channel adapter"):
        plant.build()


def test_forwarding_tables_join_their_switches() -> None:
    cables = list(ibnetdiscover.read(IBNETDISCOVER, "f"))
    fabric = build_fabric([*cables, *forwarding.read(DUMP_LFTS, "t")])
    assert fabric.tables is not None
    table = dict(zip((fabric.names[node] for node in fabric.table_switches), fabric.tables.tolist(), strict=True))
    assert table["leaf1"] == [NO_PORT, 0, 3, NO_PORT, 1, 3]
    assert table["leaf2"] == [NO_PORT] * 4 + [3, 1]
    assert not any(warning.startswith("no route") for warning in fabric.warnings)

    wrong = DUMP_LFTS.replace("0x0005 002", "0x0005 001")
    warnings = build_fabric([*cables, *forwarding.read(wrong, "t")]).warnings
    assert any(" leaf1 " in warning and " n2 mlx5_0:" in warning for warning in warnings)
    without = DUMP_LFTS[: DUMP_LFTS.index("Unicast lids [0x0-0x5] of switch Lid 3")]
    with refused("HT-fabric-files-do-not-match", where="t", switches="spine"):
        build_fabric([*cables, *forwarding.read(without, "t")])
    # Tables of before and after a cable was lost, in one folder.
    twice = build_fabric([*cables, *forwarding.read(wrong, "old"), *forwarding.read(DUMP_LFTS, "new")])
    assert twice.tables is not None and twice.tables.tolist() == fabric.tables.tolist()
    assert [warning for warning in twice.warnings if warning not in fabric.warnings and warning.endswith(" (1): spine")]
    same = build_fabric([*cables, *forwarding.read(DUMP_LFTS, "t"), *forwarding.read(DUMP_LFTS, "t")])
    assert len(same.warnings) == len(fabric.warnings)
    strange = DUMP_LFTS.replace("guid 0x000000000000000", "guid 0xf00000000000000").replace("Lid 2", "Lid 99")
    with refused(
        "HT-fabric-files-do-not-match",
        where="t:4",
        fabric="f",
        switches="f000000000000001, f000000000000002, f000000000000003",
    ):
        build_fabric([*cables, *forwarding.read(strange, "t")])


def test_two_subnets_may_use_the_same_lids() -> None:
    def elsewhere(text: str) -> str:
        return text.replace("00000000000000", "10000000000000").replace(' "n', ' "m').replace('"spine', '"other')

    listing, tables = IBNETDISCOVER + elsewhere(IBNETDISCOVER), DUMP_LFTS + elsewhere(DUMP_LFTS)
    fabric = build_fabric([*ibnetdiscover.read(listing, "f"), *forwarding.read(tables, "t")])
    assert fabric.subnet.max() == 1
    assert len(fabric.table_switches) == 6
    assert not any(warning.startswith(("no route", "switches without")) for warning in fabric.warnings)


def _group(name: str, *, hosts: tuple[str, ...] = (), switches: tuple[str, ...] = ()) -> SwitchGroup:
    return SwitchGroup(name=name, hosts=hosts, switches=switches, where="t:1")


def test_a_slurm_tree_becomes_a_fabric() -> None:
    fabric = build_fabric(
        [_group("core", switches=("s2", "s10")), _group("s10", hosts=("n10", "n2")), _group("s2", hosts=("n1",))]
    )
    assert fabric.names == ("core", "s2", "s10", "n1", "n2", "n10")
    assert fabric.level.tolist() == [2, 1, 1, 0, 0, 0]
    assert fabric.leaves[fabric.hosts.index("n10")] == {2}
    assert set(fabric.bandwidth) == {1.0}
    for node in range(6):
        ports = sorted(fabric.source_port[fabric.source == node].tolist())
        assert ports == list(range(1, len(ports) + 1))
    assert fabric.warnings == ()


def test_blocks_are_joined_with_a_warning() -> None:
    fabric = build_fabric([_group("b1", hosts=("n1",)), _group("b2", hosts=("n2",))])
    assert fabric.subnet.tolist() == [0] * 5
    assert fabric.level.tolist() == [1, 1, 2, 0, 0]
    (warning,) = fabric.warnings
    assert " b1, b2 " in warning


def test_files_that_are_no_fabric(tmp_path: Path) -> None:
    file = tmp_path / "f"
    for content, found in (
        (b"", "an empty file"),
        (b"\x7fELF\0\0\xff", "a binary file"),
        (b"hello\n", "a file of no known"),
    ):
        file.write_bytes(content)
        with refused("HT-fabric-unknown-format", where=file) as caught:
            read_fabric(file)
        assert caught.value.values["found"].startswith(found)
    file.write_text(IBNETDISCOVER)
    with refused("HT-fabric-unknown-format", where=file):
        read_fabric(file, file)
    (tmp_path / "none").mkdir()
    with refused("HT-fabric-unknown-format", path=tmp_path / "none"):
        read_fabric(file, tmp_path / "none")
    with refused("HT-file-unreadable", path=tmp_path / "nowhere"):
        read_fabric(file, tmp_path / "nowhere")
    with refused("HT-file-unreadable", path=tmp_path, reason="Is a directory"):
        read_fabric(tmp_path)


@pytest.mark.parametrize(
    ("description", "host", "device"),
    [
        ("a08-p1-dgx-04-c01 mlx5_5", "a08-p1-dgx-04-c01", "mlx5_5"),
        ("r-ufm111 HCA-1", "r-ufm111", "HCA-1"),
        ("n1 mlx5_bond_0", "n1", "mlx5_bond_0"),
        ("n1", "n1", ""),
        ("MT4129 ConnectX7   Mellanox Technologies", None, "MT4129 ConnectX7   Mellanox Technologies"),
        ("MT25408 ConnectX-3", None, "MT25408 ConnectX-3"),
        ("Connect-IB", None, "Connect-IB"),
        # Without the host's name, all nodes would be one host.
        (" mlx5_0", None, "mlx5_0"),
        ("HCA-1", None, "HCA-1"),
        ("mlx5-node-1 HCA-1", "mlx5-node-1", "HCA-1"),
        ("", None, ""),
    ],
)
def test_hosts_and_devices_of_descriptions(description: str, host: str | None, device: str) -> None:
    assert host_and_device(description) == (host, device)


def test_other_names() -> None:
    assert switch_name("MF0;A09-P1-IBLEAF-04-04:MQM9701/U1") == "A09-P1-IBLEAF-04-04"
    assert switch_name("MF0;director:CS7500/L01/U1") == "MF0;director:CS7500/L01/U1"
    assert switch_name("spine") == "spine"
    assert sorted(["n10", "n9", "m²", "n1a"], key=natural_key) == ["m²", "n1a", "n9", "n10"]
    assert [
        name for name in ("cufm-1", "dc1-ufm01", "mds2", "small", "costly", "nas", "node-sm1") if is_service_host(name)
    ] == [
        "cufm-1",
        "dc1-ufm01",
        "mds2",
        "nas",
        "node-sm1",
    ]


def test_payload_of_links() -> None:
    assert bandwidth(4, "QDR") == 4e9, "40 Gbit/s less 8b/10b"
    assert bandwidth(4, "FDR") == pytest.approx(56.25e9 / 8 * 64 / 66)
    assert bandwidth(4, "NDR") == 50e9
    assert np.isnan(bandwidth(None, "NDR"))
