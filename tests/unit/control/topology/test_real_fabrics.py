"""Listings by the real tools: what is known of the fabrics, and what is odd in them.

A small one is here: ibsim in the place of the hardware, routed by opensm, read by ibnetdiscover and ibroute. Those of
real clusters are not in every clone.
"""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from hpctrain.common.errors import HpctrainError
from hpctrain.control.topology.build import read_fabric
from hpctrain.control.topology.routes import Routes
from hpctrain.control.topology.summary import leaf_oversubscription
from support.refusals import refused

_SMALL = Path(__file__).parent / "discovered"
_DATA = Path(__file__).parents[4].parent / "shared" / "data" / "fabrics"


def _real(name: str) -> Path:
    if not _DATA.is_dir():
        pytest.skip(f"no listings of real clusters at {_DATA}")
    return _DATA / name


@pytest.mark.parametrize("name", ["ibnetdiscover.txt", "ibnetdiscover-p.txt"])
def test_a_small_one_with_its_forwarding_tables(name: str) -> None:
    fabric = read_fabric(_SMALL / name, _SMALL / "ibroutes")
    assert np.bincount(fabric.level + 1).tolist() == [0, 6, 2, 2], "left out, adapters, leaves, spines"
    assert fabric.hosts[1:] == ("gpu1", "gpu2", "gpu3", "gpu4", "gpu5")
    assert fabric.names[:4] == ("core-spine1", "core-spine2", "rack1-leaf", "rack2-leaf")
    assert set(fabric.bandwidth) == {4e9}, "QDR: 4 lanes of 8 Gbit/s"
    assert fabric.tables is not None
    assert fabric.tables.shape == (4, 0xB + 1)
    assert list(Routes(fabric).faults()) == []
    assert set(leaf_oversubscription(fabric).values()) == {1.5}
    text = "\n".join(fabric.warnings)
    assert "1 SHARP" in text and "GUID (1)" in text
    assert ("(6)" in text) == (name == "ibnetdiscover-p.txt"), "ports without a cable"


def test_dgx_ndr_119() -> None:
    path = _real("dgx-ndr-119.ibnetdiscover")
    fabric = read_fabric(path)
    listed = re.findall(r'^Ca\t1 "H-[0-9a-f]{16}"\t\t# "(.*)"$', path.read_text(), re.MULTILINE)
    assert len(listed) == 582
    assert np.bincount(fabric.level + 1).tolist() == [0, 542, 31, 9], "left out, adapters, leaves, spines"
    # Named hosts are the first words of "host device"; 69 adapters give a product's name and count as a host each.
    named = {name.split()[0] for name in listed if re.fullmatch(r"\S+ (HCA-\d|mlx5_\d)", name)}
    assert len(named) == 122
    assert len([name for name in named if "-dgx-" in name]) == 119
    assert named | {host for host in fabric.hosts if re.fullmatch("[0-9a-f]{16}", host)} == set(fabric.hosts)
    assert len(fabric.hosts) == 122 + 69
    assert all("SPINE" in fabric.names[node] for node in np.flatnonzero(fabric.level == 2))
    assert all("LEAF" in fabric.names[node] for node in np.flatnonzero(fabric.level == 1))
    assert set(fabric.bandwidth) == {50e9}, "NDR: 4 lanes of 100 Gbit/s"
    assert len(fabric.leaves[fabric.hosts.index("a08-p1-dgx-04-c01")]) == 4, "rail-optimised"
    text = "\n".join(fabric.warnings)
    assert "40 SHARP" in text and "GUID (69)" in text
    assert "localhost, ubuntu" in text
    assert "slower" not in text


def test_avakas_with_its_forwarding_tables() -> None:
    avakas = _real("avakas")
    fabric = read_fabric(avakas / "ibnetdiscover-p.txt", avakas / "ibroutes")
    assert np.bincount(fabric.level).tolist() == [281, 16, 9]
    assert fabric.tables is not None
    assert fabric.tables.shape == (25, 0x132 + 1)
    assert list(Routes(fabric).faults()) == []
    text = "\n".join(fabric.warnings)
    assert "834" in text and "(43)" in text
    slow = r"\(1\): node008 HCA-1 .* GUID=0x00066a00e8001310 L107 \(50%\)"
    assert re.search(slow, text)
    assert "linear forw" in text, "the error with which ibroute ended every table"
    assert max(leaf_oversubscription(fabric).values()) == 1.0


@pytest.mark.parametrize(
    ("cluster", "entry", "wrong", "leaf"),
    [
        ("small", "0x0008 004 ", "0x0008 002 ", "rack1-leaf"),
        ("avakas", "0x0025 024 ", "0x0025 008 ", "QLogic 12800-180 GUID=0x00066a00e8001310 L101"),
    ],
)
def test_one_wrong_entry_of_a_table_is_reported(
    tmp_path: Path, cluster: str, entry: str, wrong: str, leaf: str
) -> None:
    """An adapter that hangs on another switch is sent to one that hangs on this one."""
    folder = _SMALL if cluster == "small" else _real(cluster)
    for file in (folder / "ibroutes").iterdir():
        (tmp_path / file.name).write_text(file.read_text())
    file = tmp_path / "switch-lid-1.txt"
    assert file.read_text().count(f"\n{entry}") == 1
    file.write_text(file.read_text().replace(f"\n{entry}", f"\n{wrong}"))
    fabric = read_fabric(folder / "ibnetdiscover-p.txt", tmp_path)
    lost = [warning for warning in fabric.warnings if warning.startswith("no route")]
    assert any(f" {leaf} " in warning for warning in lost), fabric.warnings


def test_switches_cabled_to_themselves_in_a_real_listing() -> None:
    fabric = read_fabric(_real("switchib-2016-umad-error.ibnetdiscover"))
    assert np.bincount(fabric.level).tolist() == [6, 2]
    assert fabric.hosts == ("r-ufm96", "r-ufm100", "r-ufm101", "r-ufm111", "r-ufm216")
    assert (fabric.source != fabric.target).all()
    text = "\n".join(fabric.warnings)
    assert "(6)" in text and "umad" in text
    slow = "r-ufm96 .* switch-de779e .25%"
    assert re.search(slow, text), "it is SDR among QDR"


def test_a_discovery_that_found_one_adapter_is_an_error(tmp_path: Path) -> None:
    head, *_, alone = (_SMALL / "ibnetdiscover.txt").read_text().rstrip().split("\n\n")
    # Without its cable.
    (tmp_path / "listing").write_text(f"{head}\n\n{alone[: alone.index('[1]')]}")
    name = re.findall(r'^Ca.*# "(.*)"$', alone, re.MULTILINE)[0]
    with refused("HT-fabric-no-hosts", found=f"adapters without a cable to anything: {name}"):
        read_fabric(tmp_path / "listing")


def test_a_real_discovery_that_found_one_adapter_is_an_error() -> None:
    with refused("HT-fabric-no-hosts", found="adapters without a cable to anything: dgx-gb200-n01-c1 HCA-1"):
        read_fabric(_real("lone-ca.ibnetdiscover"))


@pytest.mark.parametrize("share", [0.1, 0.5, 0.8])
@pytest.mark.parametrize(
    "name", ["ibnetdiscover.txt", "ibnetdiscover-p.txt", "dgx-ndr-119.ibnetdiscover", "avakas/ibnetdiscover-p.txt"]
)
def test_a_listing_that_is_cut_off_is_an_error(tmp_path: Path, name: str, share: float) -> None:
    text = (_SMALL / name if (_SMALL / name).exists() else _real(name)).read_text()
    lines = text.splitlines(keepends=True)
    (tmp_path / "cut").write_text("".join(lines[: int(len(lines) * share)]))
    with pytest.raises(HpctrainError) as caught:
        read_fabric(tmp_path / "cut")
    assert caught.value.code in {"HT-fabric-file-damaged", "HT-fabric-unknown-format"}
    (tmp_path / "cut").write_text(text[: int(len(text) * share)])
    with pytest.raises(HpctrainError) as caught:
        read_fabric(tmp_path / "cut")
    assert caught.value.code in {"HT-fabric-file-damaged", "HT-fabric-unknown-format"}
