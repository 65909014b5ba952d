"""Disks and limits that are too short for ranks to start are named as the cause."""

from __future__ import annotations

from pathlib import Path

from hpctrain.control.launchers.shortages import shortages
from support.small_disks import small_disk_at


def test_a_host_with_room_lacks_nothing(tmp_path: Path) -> None:
    assert list(shortages({"TMPDIR": str(tmp_path)}, tmp_path)) == []


def test_folders_that_are_full_small_or_missing_are_named(tmp_path: Path) -> None:
    with small_disk_at(tmp_path / "small", "64k") as small:
        (said,) = shortages({"TMP": str(tmp_path)}, small)
        assert str(small) in said.fault and "0.0655 MB" in said.fault
        (small / "all").write_bytes(bytes(64 << 10))
        (said,) = shortages({"TMPDIR": str(small)}, tmp_path)
        assert str(small) in said.fault and "TMPDIR" in said.remedy
        (said,) = shortages({"TMPDIR": str(tmp_path)}, tmp_path, run=small)
        assert str(small) in said.fault and "--run-dir" in said.remedy
    (said,) = shortages({"TMPDIR": str(tmp_path / "none")}, tmp_path)
    assert str(tmp_path / "none") in said.fault
    assert list(tmp_path.iterdir()) == [small], "nothing is left of the look"
