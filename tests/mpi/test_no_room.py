"""Runs whose job has less memory than they take: the cause is the first that is said."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

BIN = Path(sys.executable).parent


def run(
    folder: Path, through: Sequence[str], script: str = "import hpctrain as ht\nht.init()\n", **variables: str
) -> tuple[int, list[str]]:
    """A run of two ranks: its exit code, and the lines it printed to stderr."""
    (folder / "script.py").write_text(script)
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


@pytest.fixture
def small_memory() -> Iterator[Path]:
    """The file that takes the processes of a control group of 1 GB, which is gone afterwards."""
    groups = dict(line.split(":", 2)[1:] for line in Path("/proc/self/cgroup").read_text().splitlines())
    root, place, limit = (
        ("/sys/fs/cgroup/memory", groups["memory"], "memory.limit_in_bytes")
        if "memory" in groups
        else ("/sys/fs/cgroup", groups.get("", ""), "memory.max")
    )
    group = Path(f"{root}{place}") / f"hpctrain-test-{os.getpid()}"
    try:
        group.mkdir()
        (group / limit).write_text(str(10**9))
    except OSError as error:
        pytest.skip(f"no control group can be made here: {error}")
    try:
        yield group / "cgroup.procs"
    finally:
        group.rmdir()


def test_memory_of_the_job(tmp_path: Path, small_memory: Path) -> None:
    joins = "import os, sys; open(sys.argv[1], 'w').write(str(os.getpid())); os.execvp(sys.argv[2], sys.argv[2:])"
    through = [sys.executable, "-c", joins, str(small_memory)]
    script = "import hpctrain as ht\nif ht.init().rank == 1:\n    bytearray(2 * 10**9)\nht.init().barrier()\n"
    code, lines = run(tmp_path, through, script=script)
    assert code == 4
    failure = json.loads((tmp_path / "run" / "summary.json").read_text())["failure"]
    assert (failure["code"], failure["rank"]) == ("HT-rank-out-of-memory", 1)
    assert failure["message"].count("1 GB") == 2  # its limit, and its peak
    assert any("--mem" in line for line in lines)
