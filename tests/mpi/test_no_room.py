"""Runs on a host that lacks something for ranks to start: the cause is the first that is said."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from support.small_disks import mounted_over

BIN = Path(sys.executable).parent
SHARED = Path("/dev/shm")


def run(folder: Path, through: Sequence[str], **variables: str) -> tuple[int, list[str]]:
    """A run of two ranks: its exit code, and the lines it printed to stderr."""
    (folder / "script.py").write_text("import hpctrain as ht\nht.init()\n")
    words = [sys.executable, "-m", "hpctrain", "run", "script.py", "-np", "2", "--backend", "mpi"]
    environment = {**os.environ, "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}", **variables}
    ended = subprocess.run(
        [*through, *words, "--run-dir", "run"],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    return ended.returncode, ended.stderr.splitlines()


def message(folder: Path) -> str:
    return str(json.loads((folder / "run" / "summary.json").read_text())["failure"]["message"])


def test_shared_memory_without_room(tmp_path: Path) -> None:
    code, lines = run(tmp_path, mounted_over("size=64k", SHARED))
    assert code in (1, 4)
    first = next(number for number, line in enumerate(lines) if "MPI" in line or str(SHARED) in line)
    assert str(SHARED) in lines[first] and "0.0655 MB" in lines[first]
    assert any("--shm-size" in line for line in lines[first + 1 :])
    assert message(tmp_path).startswith(f"{SHARED}, ")


def test_the_checks_of_a_machine_name_both(tmp_path: Path) -> None:
    full = tmp_path / "full"
    full.mkdir()
    ended = subprocess.run(
        [*mounted_over("ro", full, SHARED), sys.executable, "-m", "hpctrain", "doctor", "--json"],
        cwd=tmp_path,
        env={**os.environ, "TMPDIR": str(full)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ended.returncode == 3, ended.stderr
    checks = {check["name"]: check for check in json.loads(ended.stdout)["checks"]}
    assert checks["shared memory"]["status"] == "failed"
    assert checks["temporary folder"]["status"] == "failed"
    assert str(full) in checks["temporary folder"]["found"]
