"""Listings of real clusters: their known figures, and what is odd in them."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from hpctrain.errors import HpctrainError
from hpctrain.topology.build import read_fabric
from hpctrain.topology.levels import oversubscription
from hpctrain.topology.routes import Routes

_DATA = Path(__file__).parents[3].parent / "shared" / "data" / "fabrics"
pytestmark = pytest.mark.skipif(not _DATA.is_dir(), reason=f"no listings of real clusters at {_DATA}")


def test_dgx_ndr_119() -> None:
    path = _DATA / "dgx-ndr-119.ibnetdiscover"
    fabric = read_fabric(path)
    listed = re.findall(r'^Ca\t1 "H-[0-9a-f]{16}"\t\t# "(.*)"$', path.read_text(), re.MULTILINE)
    assert len(listed) == 582
    assert np.bincount(fabric.level + 1).tolist() == [40, 542, 31, 9], "left out, adapters, leaves, spines"
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
    assert "40 SHARP aggregation nodes" in text
    assert "without a host name, each taken for a host of its own under its GUID (69)" in text
    assert "localhost, ubuntu" in text
    assert "slower" not in text


def test_avakas_with_its_forwarding_tables() -> None:
    fabric = read_fabric(_DATA / "avakas" / "ibnetdiscover-p.txt", _DATA / "avakas" / "ibroutes")
    assert np.bincount(fabric.level).tolist() == [281, 16, 9]
    assert fabric.tables is not None
    assert fabric.tables.shape == (25, 0x132 + 1)
    assert list(Routes(fabric).faults()) == []
    text = "\n".join(fabric.warnings)
    assert "(lines: 834): 'DR path slid 0" in text
    assert (
        "links slower than their peers (1): node008 HCA-1 to QLogic 12800-180 GUID=0x00066a00e8001310 L107 (50%)"
        in text
    )
    assert "nothing answers (no cable, or a dead one) (43)" in text
    assert "linear forw" in text, "the error with which ibroute ended every table"
    assert max(oversubscription(fabric).values()) == 1.0


def test_one_wrong_entry_of_a_real_table_is_reported(tmp_path: Path) -> None:
    for file in (_DATA / "avakas" / "ibroutes").iterdir():
        (tmp_path / file.name).write_text(file.read_text())
    file = tmp_path / "switch-lid-1.txt"
    # The entry for an adapter that hangs on another switch now leads to one that hangs on this one.
    file.write_text(re.sub(r"^0x0025 024 ", "0x0025 008 ", file.read_text(), flags=re.MULTILINE))
    fabric = read_fabric(_DATA / "avakas" / "ibnetdiscover-p.txt", tmp_path)
    lost = [warning for warning in fabric.warnings if warning.startswith("no route")]
    assert any(warning.startswith("no route from QLogic 12800-180 GUID=0x00066a00e8001310 L101 to") for warning in lost)


def test_switches_cabled_to_themselves_and_noise_before_the_header() -> None:
    fabric = read_fabric(_DATA / "switchib-2016-umad-error.ibnetdiscover")
    assert np.bincount(fabric.level).tolist() == [6, 2]
    assert fabric.hosts == ("r-ufm96", "r-ufm100", "r-ufm101", "r-ufm111", "r-ufm216")
    assert (fabric.source != fabric.target).all()
    text = "\n".join(fabric.warnings)
    assert "cabled to their own switch, left out (6)" in text
    assert "umad (DR path" in text
    assert "r-ufm96 HCA-1 to switch-de779e (25%)" in text, "SDR among QDR"


def test_a_discovery_that_found_one_adapter_is_an_error() -> None:
    with pytest.raises(HpctrainError, match=r"no host on a fabric, only .* dgx-gb200-n01-c1 HCA-1") as caught:
        read_fabric(_DATA / "lone-ca.ibnetdiscover")
    assert "ibstat" in caught.value.hint


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
def test_a_listing_that_is_cut_off_is_an_error(tmp_path: Path, share: float) -> None:
    for name in ("dgx-ndr-119.ibnetdiscover", "avakas/ibnetdiscover-p.txt"):
        text = (_DATA / name).read_text()
        lines = text.splitlines(keepends=True)
        (tmp_path / "cut").write_text("".join(lines[: int(len(lines) * share)]))
        with pytest.raises(HpctrainError, match=r"cut:[0-9]+: .*cut off|no known format"):
            read_fabric(tmp_path / "cut")
        (tmp_path / "cut").write_text(text[: int(len(text) * share)])
        with pytest.raises(HpctrainError, match=r"cut:[0-9]+: |no known format"):
            read_fabric(tmp_path / "cut")
