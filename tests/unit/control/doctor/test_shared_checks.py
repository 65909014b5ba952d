"""Checks of the run directory, of the software, and of what ranks measured together."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from hpctrain.common.cluster.checks import Check
from hpctrain.control.doctor import host_checks, rank_checks
from hpctrain.control.doctor.rank_checks import MeasuredAllreduce, World, merge
from hpctrain.control.horovod.check import AN_MPI
from support.golden import check_text
from support.small_disks import small_disk_at


def refused(check: Check, found: str, remedy: str) -> None:
    assert check.status == "failed", check
    assert found in check.found
    assert remedy in check.remedy
    assert check.wanted


def test_a_folder_is_tried_for_real(tmp_path: Path) -> None:
    space, write = host_checks.disk(tmp_path / "runs" / "later")
    assert (space.status, write.status) == ("ok", "ok") and str(tmp_path) in write.found
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_refuses_and_one_that_is_slow_and_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_checks, "_FREE_BYTES", 10**18)
    monkeypatch.setattr(host_checks, "_BYTES_PER_S", 1e15)
    space, write = host_checks.disk(tmp_path)
    refused(space, f"free in {tmp_path}", "remove old runs")
    refused(write, f"MB/s with fsync in {tmp_path}", "faster file system")

    def refuse(**_: object) -> None:
        raise PermissionError(13, "Permission denied")

    # The superuser, as whom tests may run, can write any folder.
    monkeypatch.setattr(host_checks.tempfile, "TemporaryFile", refuse)
    refused(host_checks.disk(tmp_path)[1], "Permission denied", "--run-dir")


def test_a_home_that_takes_no_more_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "you"))
    assert host_checks.home_folder().status == "ok"
    with small_disk_at(tmp_path / "you", "2g,nr_inodes=900"):
        refused(host_checks.home_folder(), f"and 899 files free in {tmp_path}/you (tmpfs)", "HF_HOME")


def test_an_import_that_takes_long_or_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_checks, "find_spec", lambda name: None)
    assert host_checks.import_of_torch().status == "not applicable"
    monkeypatch.setattr(host_checks, "find_spec", lambda name: name)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    package = tmp_path / "torch.py"
    package.touch()
    assert host_checks.import_of_torch().status == "ok"
    package.write_text("raise ImportError('libmkl is missing')")
    refused(host_checks.import_of_torch(), "ImportError: libmkl is missing", "one archive")
    package.write_text("import time; time.sleep(9)")
    monkeypatch.setattr(host_checks, "_IMPORT_LIMIT", 1.0)
    refused(host_checks.import_of_torch(), "did not", "one archive")


def world(size: int = 2, claimed: int | None = 2, host: str = "n1") -> World:
    name = "Open MPI's mpirun" if claimed else None
    return World(host=host, size=size, mpi="Open MPI 5.0.11", launcher=name, claimed=claimed)


def test_launcher_and_mpi() -> None:
    assert rank_checks.launcher_and_mpi([world(), world()], 2).status == "ok"
    # srun --mpi=pmix sets none of the variables that are looked at under some names.
    assert rank_checks.launcher_and_mpi([world(claimed=None)] * 2, 2).status == "ok"
    refused(rank_checks.launcher_and_mpi([world(size=1)] * 2, 2), "sees 1 rank; Open MPI's mpirun says 2", "mpirun")
    refused(
        rank_checks.launcher_and_mpi([world(size=1, claimed=None)] * 2, 2), "no launcher has set", "srun --mpi=pmix"
    )
    mixed = rank_checks.launcher_and_mpi([world(), world(claimed=8, host="n2")], 2)
    refused(mixed, "says 8", "hpctrain horovod build")
    assert mixed.where == ("n2",)


def test_versions_that_differ_are_named_with_their_hosts() -> None:
    same = {"torch": "2.13.0", "numpy": "2.4"}
    differing = {"n1": same, "n2": {**same, "torch": "2.12.0"}, "n3": same, "n4": {"numpy": "2.4"}}
    torch, rest = rank_checks.same_versions(differing)
    refused(torch, "2.13.0 on n[1,3]; 2.12.0 on n2; none on n4", "one environment")
    assert (rest.status, rest.found) == ("ok", "numpy 2.4")
    (alike,) = rank_checks.same_versions({"n1": same, "n2": same})
    assert (alike.status, alike.found.split(", ")) == ("ok", ["torch 2.13.0", "numpy 2.4"])


def test_what_horovod_lacks_is_missed_only_where_it_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    missing = Check(name="horovod", status="failed", found="Horovod is not built", wanted="0.28.1", remedy="build")
    there = Check(name="horovod", status="ok", found="Horovod 0.28.1", wanted="0.28.1")
    torch = Check(name="torch", status="failed", found="Horovod is not built for PyTorch", wanted="PyTorch 2")
    no_mpi = Check(name="mpi", status="failed", found="no mpirun", wanted=AN_MPI)

    def statuses(*checks: Check, gpus: int) -> list[str]:
        return [check.status for check in host_checks.horovod(checks, gpus)]

    # hpctrain's own engine needs an MPI too.
    assert statuses(missing, torch, no_mpi, gpus=0) == ["not applicable", "not applicable", "failed"]
    assert statuses(missing, torch, gpus=4) == ["not applicable", "not applicable"]
    # One that is there was built for these GPUs.
    assert statuses(there, torch, gpus=4) == ["ok", "failed"]
    monkeypatch.setenv("HPCTRAIN_BACKEND", "horovod")
    assert statuses(missing, torch, gpus=0) == ["failed", "failed"]
    assert [check.name for check in host_checks.horovod([missing, torch], 0)] == ["Horovod", "Horovod torch"]


def test_allreduce() -> None:
    done = rank_checks.allreduce(MeasuredAllreduce(engine="MPI", seconds=0.0012, right=True), 4)
    assert done.status == "ok" and re.findall("[0-9.]+", done.found) == ["1.2", "4"]
    refused(
        rank_checks.allreduce(MeasuredAllreduce(engine="MPI", seconds=0.0012), 4),
        "wrong numbers after 1.2 ms",
        "verify",
    )
    refused(rank_checks.allreduce(MeasuredAllreduce(engine="Horovod", error="did not end"), 4), "did not end", "verify")
    absent = MeasuredAllreduce(engine="Horovod", error="Horovod is not built", possible=False)
    assert rank_checks.allreduce(absent, 4).status == "not applicable"


def test_equal_outcomes_of_many_hosts_are_one_line() -> None:
    good = Check(name="memlock", status="ok", found="unlimited")
    bad = Check(name="memlock", status="failed", found="64 KiB", remedy="ulimit")
    hosts = {f"n{number}": [bad if number in (2, 3) else good] for number in range(1, 6)}
    one, other = merge(hosts)
    assert (one.status, one.where) == ("ok", ("n1", "n4", "n5"))
    assert (other.status, other.where) == ("failed", ("n2", "n3"))
    (all_alike,) = merge({host: [good] for host in hosts})
    assert all_alike.where == ()


def test_measured_values_are_told_with_their_hosts() -> None:
    speeds = {f"n{number}": [Check(name="write", status="ok", found=f"{number // 2} MB/s")] for number in range(2, 12)}
    (merged,) = merge(speeds)
    check_text("doctor-values-of-hosts", merged.found)
