"""Disks and limits that are too short for ranks to start are named as the cause."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from hpctrain.supervision.room import shortages
from small_disks import small_disk_at


def test_a_host_with_room_lacks_nothing(tmp_path: Path) -> None:
    assert list(shortages({"TMPDIR": str(tmp_path)}, tmp_path)) == []


def test_folders_that_are_full_small_or_missing_are_named(tmp_path: Path) -> None:
    with small_disk_at(tmp_path / "small", "64k") as small:
        (said,) = shortages({"TMP": str(tmp_path)}, small)
        assert str(small) in said and "0.0655 MB free" in said
        (small / "all").write_bytes(bytes(64 << 10))
        (said,) = shortages({"TMPDIR": str(small)}, tmp_path)
        assert str(small) in said and "TMPDIR" in said
    (said,) = shortages({"TMPDIR": str(tmp_path / "none")}, tmp_path)
    assert str(tmp_path / "none") in said
    assert list(tmp_path.iterdir()) == [small], "nothing is left of the look"


def test_a_limit_on_files_is_named(tmp_path: Path) -> None:
    code = "from hpctrain.supervision.room import shortages; print(*shortages(), sep='\\n')"
    words = ["bash", "-c", 'ulimit -f 8; exec "$@"', "bash", sys.executable, "-c", code]
    ended = subprocess.run(words, capture_output=True, text=True, timeout=60, check=True)
    assert "ulimit -f unlimited" in ended.stdout.splitlines()[-1]


@pytest.mark.long
def test_a_run_that_cannot_start_says_so(tmp_path: Path) -> None:
    with small_disk_at(tmp_path / "small", "4k") as small:
        (small / "all").write_bytes(bytes(4 << 10))
        (tmp_path / "script.py").write_text("import hpctrain as ht\nht.init()\n")
        words = [
            sys.executable,
            "-m",
            "hpctrain",
            "run",
            "script.py",
            "-np",
            "2",
            "--oversubscribe",
            "--backend",
            "mpi",
        ]
        words = ["env", f"TMPDIR={small}", *words, "--run-dir", "run"]
        ended = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 1
    assert f"mpirun's temporary folder {small}" in ended.stderr
