"""Checks of the run directory, of the software, and of what ranks measured together."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from hpctrain.common.cluster.checks import Check
from hpctrain.control.doctor import ranks, software, storage
from hpctrain.control.doctor.host import check_host, failed_first, merge
from hpctrain.control.doctor.ranks import MeasuredAllreduce, host_order
from hpctrain.control.doctor.software import World
from hpctrain.control.doctor.storage import Disk
from hpctrain.control.horovod.check import AN_MPI
from hpctrain.control.topology.build import build_fabric
from hpctrain.control.topology.readers import slurm
from support.fake_machine import FakeMachine
from support.golden import check_text

TREE = """\
SwitchName=core Level=1 LinkSpeed=1 Nodes=n[1-4] Switches=s[1-2]
SwitchName=s1 Level=0 LinkSpeed=1 Nodes=n[1-2]
SwitchName=s2 Level=0 LinkSpeed=1 Nodes=n[3-4]
"""


def refused(check: Check, found: str, remedy: str) -> None:
    assert check.status == "failed", check
    assert found in check.found
    assert remedy in check.remedy
    assert check.wanted
    assert check.source.startswith("https://")


def test_a_folder_is_tried_for_real(tmp_path: Path) -> None:
    disk = storage.try_disk(tmp_path / "runs" / "later")
    assert disk.path == tmp_path
    assert storage.write(disk).status == "ok", disk
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_refuses_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(**_: object) -> None:
        raise PermissionError(13, "Permission denied")

    # The superuser, as whom tests may run, can write any folder.
    monkeypatch.setattr(storage.tempfile, "TemporaryFile", refuse)
    refused(storage.write(storage.try_disk(tmp_path)), "Permission denied", "--run-dir")


def test_a_slow_disk_and_a_full_one() -> None:
    slow = Disk(path=Path("/home/me"), free=10**8, bytes_per_s=1e6)
    refused(storage.write(slow), "1 MB/s with fsync in /home/me", "faster file system")
    refused(storage.space(slow), "0.1 GB in /home/me", "remove old runs")
    assert storage.space(Disk(path=Path("/scratch"), free=10**12, bytes_per_s=1e9)).status == "ok"


def world(size: int = 2, claimed: int | None = 2, host: str = "n1") -> World:
    name = "Open MPI's mpirun" if claimed else None
    return World(host=host, size=size, mpi="Open MPI 5.0.11", launcher=name, claimed=claimed)


def test_launcher_and_mpi() -> None:
    assert software.launcher_and_mpi([world(), world()], 2, {}).status == "ok"
    # srun --mpi=pmix sets none of the variables that are looked at under some names.
    assert software.launcher_and_mpi([world(claimed=None)] * 2, 2, {}).status == "ok"
    refused(software.launcher_and_mpi([world(size=1)] * 2, 2, {}), "sees 1 rank; Open MPI's mpirun says 2", "mpirun")
    refused(
        software.launcher_and_mpi([world(size=1, claimed=None)] * 2, 2, {}), "no launcher has set", "srun --mpi=pmix"
    )
    mixed = software.launcher_and_mpi([world(), world(claimed=8, host="n2")], 2, {})
    refused(mixed, "says 8", "hpctrain horovod build")
    assert mixed.where == ("n2",)
    after = software.launcher_and_mpi([world(), world()], 2, {"mpirun": "exit status 1; it said:\n  no daemon"})
    assert "; mpirun " in after.found and after.found.endswith("no daemon")


def test_versions_that_differ_are_named_with_their_hosts() -> None:
    same = {"torch": "2.13.0", "numpy": "2.4"}
    differing = {"n1": same, "n2": {**same, "torch": "2.12.0"}, "n3": same, "n4": {"numpy": "2.4"}}
    torch, rest = software.same_versions(differing)
    refused(torch, "2.13.0 on n[1,3]; 2.12.0 on n2; none on n4", "one environment")
    assert (rest.status, rest.found) == ("ok", "numpy 2.4")
    (alike,) = software.same_versions({"n1": same, "n2": same})
    assert (alike.status, alike.found.split(", ")) == ("ok", ["torch 2.13.0", "numpy 2.4"])


def test_gpus_want_nccl() -> None:
    without = Check(
        name="nccl",
        status="not applicable",
        found="the frameworks are built for CPUs",
        remedy="build",
        source="https://a",
    )
    refused(software.horovod([without], gpus=2)[0], "2 GPUs, but the frameworks are built for CPUs", "build")
    missing = Check(name="horovod", status="failed", found="Horovod is not built", wanted="0.28.1")
    no_mpi = Check(name="mpi", status="failed", found="no mpirun", wanted=AN_MPI)
    # Nothing takes it by itself where there is no GPU, but the other engine needs an MPI too.
    assert [check.status for check in software.horovod([missing, no_mpi], gpus=0)] == ["not applicable", "failed"]
    assert [check.status for check in software.horovod([missing], gpus=0, asked=True)] == ["failed"]
    (cpu,) = software.horovod([without], gpus=0)
    assert (cpu.name, cpu.status) == ("Horovod nccl", "not applicable")


def test_a_horovod_that_was_never_built_is_missed_only_where_it_is_asked_for() -> None:
    missing = Check(name="horovod", status="failed", found="Horovod is not built", wanted="0.28.1", remedy="build")
    torch = Check(
        name="torch", status="failed", found="Horovod is not built for PyTorch", wanted="PyTorch", remedy="build"
    )
    told = software.horovod([missing, torch], gpus=4)
    assert [check.status for check in told] == ["not applicable", "not applicable"]
    check_text("doctor-no-horovod", told[0].found)
    assert [check.status for check in software.horovod([missing, torch], gpus=4, asked=True)] == ["failed", "failed"]
    # One that is there was built for these GPUs.
    there = Check(name="horovod", status="ok", found="Horovod 0.28.1", wanted="0.28.1")
    assert [check.status for check in software.horovod([there, torch], gpus=4)] == ["ok", "failed"]


def test_clocks() -> None:
    assert ranks.clocks({"n1": 0.0, "n2": 2e-4}).status == "ok"
    assert ranks.clocks({"n1": 0.0}).status == "not applicable"
    apart = ranks.clocks({"n1": 0.0, "n2": 0.001, "n3": -90.5})
    refused(apart, "90.5 s apart", "chronyc")
    assert apart.where == ("n3",)


def test_allreduce() -> None:
    done = ranks.allreduce(MeasuredAllreduce(engine="MPI", seconds=0.0012, right=True), 4)
    assert done.status == "ok" and re.findall("[0-9.]+", done.found) == ["1.2", "4"]
    refused(ranks.allreduce(MeasuredAllreduce(engine="MPI", seconds=0.0012), 4), "wrong numbers after 1.2 ms", "verify")
    refused(ranks.allreduce(MeasuredAllreduce(engine="Horovod", error="did not end"), 4), "did not end", "verify")
    absent = MeasuredAllreduce(engine="Horovod", error="Horovod is not built", possible=False)
    assert ranks.allreduce(absent, 4).status == "not applicable"


def test_host_order() -> None:
    fabric = build_fabric(slurm.read(TREE, "tree"))
    assert host_order(("n1", "n2", "n3", "n4"), fabric, "tree", flat=False).status == "ok"
    mixed = host_order(("n1", "n3", "n2", "n4"), fabric, "tree", flat=False)
    refused(mixed, "4 crossings between leaf switches (tree)", "hpctrain run --hosts n1,n2,n3,n4")
    assert mixed.wanted.startswith("2,")
    assert host_order(("n1",), fabric, "tree", flat=False).status == "not applicable"
    unknown = host_order(("n1", "login1"), fabric, "tree", flat=False)
    assert (unknown.status, "login1" in unknown.found) == ("not applicable", True)
    assert "--fabric" in host_order(("n1", "n2"), fabric, "flat", flat=True).found


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


def test_failed_come_first() -> None:
    kinds = ("ok", "not applicable", "failed", "ok", "failed")
    checks = [Check(name=str(number), status=kind, found="") for number, kind in enumerate(kinds)]  # type: ignore[arg-type]
    assert [check.name for check in failed_first(checks)] == ["2", "4", "0", "3", "1"]


def test_every_check_of_a_host_has_a_source_and_a_mend_where_it_fails(tmp_path: Path) -> None:
    bare = {"nofile": (64.0, 64.0), "shared_memory": None}
    checks = [*check_host(FakeMachine(tmp_path).host(changes=bare), tmp_path), *ranks.without_ranks()]
    assert any(check.status == "failed" for check in checks)
    for check in checks:
        assert check.source.startswith("https://"), check
        assert check.found, check
        assert check.status != "failed" or (check.remedy and check.wanted), check
