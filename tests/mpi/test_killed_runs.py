"""``kill -9`` of everything of a run, beside another one that must not lose anything."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil

from hpctrain.common.run.directory import RunDirectory
from hpctrain.common.run.records import read_records
from support.launching import Launch

BIN = Path(sys.executable).parent
# A window makes a further file in shared memory.
SCRIPT = """
import sys, time
from pathlib import Path
from mpi4py import MPI
import hpctrain as ht
ht.init()
comm = MPI.COMM_WORLD
comm.Barrier()
if comm.rank == 0:
    Path(sys.argv[1], "up").touch()
deadline = time.monotonic() + 300
while not Path(sys.argv[1], "go").exists():
    assert time.monotonic() < deadline
    time.sleep(0.05)
window = MPI.Win.Allocate_shared(4096, 1, comm=comm)
assert comm.allreduce(1) == comm.size
window.Free()
"""


def started(folder: Path, name: str) -> subprocess.Popen[bytes]:
    (folder / name).mkdir()
    words = [sys.executable, "-m", "hpctrain", "run", "script.py", "-np", "2", "--oversubscribe", "--backend", "mpi"]
    environment = {**os.environ, "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}"}
    with (folder / name / "printed").open("wb") as printed:
        return subprocess.Popen(
            [*words, "--run-dir", f"run-{name}", "--tracking", "none", "--", name],
            cwd=folder,
            env=environment,
            stdout=printed,
            stderr=printed,
            start_new_session=True,
        )


def wait_for(condition: Callable[[], bool], process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)


def folder_of(directory: RunDirectory) -> Path:
    """Where the ranks have their segments."""
    found = set()
    for record in read_records(directory).values():
        lines = Path(f"/proc/{record.pid}/maps").read_text().splitlines()
        found |= {Path(line.split()[-1]).parent for line in lines if "/sm_segment." in line}
    (folder,) = found
    return folder


def family(process: subprocess.Popen[bytes]) -> list[psutil.Process]:
    if process.poll() is not None:
        return []
    own = psutil.Process(process.pid)
    return [own, *own.children(recursive=True)]


def files_of(process: psutil.Process) -> list[Path]:
    return [path for path in Path(f"/proc/{process.pid}/fd").iterdir() if path.exists()]


def test_the_next_start_removes_what_a_killed_run_left_and_nothing_of_a_live_one(
    hpctrain: Launch, tmp_path: Path
) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    live, killed = started(tmp_path, "live"), started(tmp_path, "killed")
    members: list[psutil.Process] = []
    try:
        for process, name in ((live, "live"), (killed, "killed")):
            wait_for((tmp_path / name / "up").exists, process)
        members = [*family(live), *family(killed)]
        kept, left = (folder_of(RunDirectory(tmp_path / f"run-{name}")) for name in ("live", "killed"))
        assert kept != left
        before = sorted(kept.rglob("*"))
        assert len([path for path in before if path.name.startswith("sm_segment.")]) == 2
        doomed = family(killed)
        assert len(doomed) == 4, "hpctrain, mpirun and two ranks"
        assert [left.samefile(path) for path in files_of(doomed[1])].count(True) == 1, "mpirun keeps it locked"
        for member in doomed:
            member.kill()
        killed.wait(timeout=60)
        psutil.wait_procs(doomed, timeout=60)

        (tmp_path / "next").mkdir()
        (tmp_path / "next" / "go").touch()
        start = ("run", "script.py", "-np", "2", "--oversubscribe", "--backend", "mpi")
        result = hpctrain(*start, "--run-dir", "run-next", "--", "next")
        assert result.returncode == 0, result.stdout
        assert not left.exists()
        assert sorted(kept.rglob("*")) == before
        (tmp_path / "live" / "go").touch()
        assert live.wait(timeout=120) == 0, (tmp_path / "live" / "printed").read_text()
        assert not kept.exists()
    finally:
        for member in members or [*family(live), *family(killed)]:
            if member.is_running():
                member.kill()
        live.wait(timeout=60)
        killed.wait(timeout=60)
