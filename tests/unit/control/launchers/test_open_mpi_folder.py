"""Folders of killed runs are removed, and nothing else is."""

from __future__ import annotations

import mmap
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from hpctrain.control.launchers.open_mpi_folder import has_place, own_folder, remove_leftovers
from support.small_disks import small_disk_at

NAME = "hpctrain-open-mpi-abcdefgh"

# A launcher that is killed at once, and what it started, which lives on.
KILLED = """
import os, signal, subprocess, sys
from pathlib import Path
from hpctrain.control.launchers.open_mpi_folder import own_folder
with own_folder(True, Path(sys.argv[1])) as folder:
    (folder.path / "sm_segment").write_bytes(bytes(4096))
    left = subprocess.Popen(["sleep", "300"], pass_fds=[folder.descriptor], stdout=subprocess.DEVNULL)
    print(left.pid, folder.path, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


def leftover(shared: Path, name: str = NAME) -> Path:
    folder = shared / name
    folder.mkdir(mode=0o700)
    (folder / "ompi.1").mkdir()
    (folder / "ompi.1" / "file").write_bytes(b"1")
    return folder


def test_a_folder_lives_as_long_as_its_run(tmp_path: Path) -> None:
    with own_folder(True, tmp_path) as folder:
        assert folder is not None
        assert set(folder.environment.values()) == {str(folder.path)}
        (folder.path / "session").mkdir()
        assert remove_leftovers(tmp_path) == []
        assert folder.path.stat().st_mode & 0o777 == 0o700
    assert list(tmp_path.iterdir()) == []


def test_two_runs_have_two_folders(tmp_path: Path) -> None:
    with own_folder(True, tmp_path) as one, own_folder(True, tmp_path) as other:
        assert one and other and one.path != other.path


def test_what_a_killed_launcher_started_keeps_the_folder(tmp_path: Path) -> None:
    ended = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], stdout=subprocess.PIPE, text=True, timeout=60)
    assert ended.returncode == -signal.SIGKILL
    pid, path = ended.stdout.split()
    try:
        assert remove_leftovers(tmp_path) == []
    finally:
        left = psutil.Process(int(pid))
        left.kill()
        deadline = time.monotonic() + 60
        # Its lock is gone although nobody may ever ask for its exit status.
        while left.is_running() and left.status() != psutil.STATUS_ZOMBIE:
            assert time.monotonic() < deadline
            time.sleep(0.02)
    assert (Path(path) / "sm_segment").exists()
    assert remove_leftovers(tmp_path) == [Path(path)]
    assert list(tmp_path.iterdir()) == []


def test_a_folder_in_the_memory_of_a_rank_stays(tmp_path: Path) -> None:
    segment = leftover(tmp_path) / "sm_segment"
    segment.write_bytes(bytes(mmap.PAGESIZE))
    with segment.open("r+b") as file, mmap.mmap(file.fileno(), 0):
        file.close()
        assert remove_leftovers(tmp_path) == []
    assert remove_leftovers(tmp_path) == [tmp_path / NAME]


def test_what_only_looks_like_one_stays(tmp_path: Path) -> None:
    shared, elsewhere = tmp_path / "shared", tmp_path / "elsewhere"
    shared.mkdir()
    elsewhere.mkdir()
    data = leftover(shared, "hpctrain-open-mpi-datasets-of-mine")
    (shared / NAME).symlink_to(leftover(elsewhere))
    (shared / "hpctrain-open-mpi-aaaaaaaa").write_bytes(b"a file")
    open_to_all = leftover(shared, "hpctrain-open-mpi-bbbbbbbb")
    open_to_all.chmod(0o755)
    (shared / "sm_segment.host.0.1.0").write_bytes(b"another run's")
    before = sorted(tmp_path.rglob("*"))
    assert remove_leftovers(shared) == []
    assert sorted(tmp_path.rglob("*")) == before
    assert data in before


@pytest.mark.skipif(os.geteuid() != 0, reason="giving a folder to another user takes root")
def test_a_folder_of_another_user_stays(tmp_path: Path) -> None:
    folder = leftover(tmp_path)
    os.chown(folder, 1234, -1)
    assert remove_leftovers(tmp_path) == []
    assert folder.exists()


def test_without_room_or_wish_there_is_none(tmp_path: Path) -> None:
    with small_disk_at(tmp_path / "small", "64k") as small, own_folder(True, small) as folder:
        assert folder is None
    with own_folder(True, tmp_path / "missing") as folder:
        assert folder is None
    with own_folder(False, tmp_path) as folder:
        assert folder is None


def test_a_place_that_the_user_has_chosen_is_left_to_the_user() -> None:
    for name in ("OMPI_MCA_btl_sm_backing_directory", "OMPI_MCA_btl_vader_backing_directory"):
        assert has_place({name: "/scratch"}, ())
    assert has_place({"PRTE_MCA_prte_local_tmpdir_base": "/scratch"}, ())
    assert has_place({}, ("--mca", "osc_sm_backing_directory", "/scratch"))
    assert not has_place({"TMPDIR": "/scratch", "OMPI_MCA_btl": "^tcp"}, ("--mca", "btl", "^tcp"))
