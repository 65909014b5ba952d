"""``hpctrain plan``."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from hpctrain.cli.main import main
from hpctrain.cluster.mpi import MpiInstallation
from hpctrain.run.plan import Plan

TREE = "SwitchName=core Switches=s[1-2]\nSwitchName=s1 Nodes=n[1,3]\nSwitchName=s2 Nodes=n[2,4]\n"
NODE = """\
\tGPU0\tGPU1\tNIC0\tNIC1\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID
GPU0\t X \tNV4\tPIX\tSYS\t0-3\t0\tN/A
GPU1\tNV4\t X \tSYS\tPIX\t4-7\t1\tN/A
NIC0\tPIX\tSYS\t X \tSYS
NIC1\tSYS\tPIX\tSYS\t X

NIC Legend:

  NIC0: mlx5_0
  NIC1: mlx5_1
"""
OPEN_MPI = MpiInstallation(flavour="open-mpi-5", version="5.0", mpirun=Path("/mpi/mpirun"), mpicc=None, mpicxx=None)


@pytest.fixture(autouse=True)
def _files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("hpctrain.cluster.programs.shutil.which", lambda program, path=None: None)
    Path("topology.conf").write_text(TREE)
    Path("node.txt").write_text(NODE)


def test_text(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--fabric", "topology.conf", "--hosts", "n[1-4]", "--node", "node.txt", "--interface", "ib0"]
    assert main(["plan", "digits", *options]) == 0
    said = capsys.readouterr().out
    # One rank a GPU; each with the adapter and the cores that are near to it.
    assert "digits: 8 ranks" in said
    assert "n1  ranks 0-1\n    rank 0: GPU 0, mlx5_0, cores 0-3\n    rank 1: GPU 1, mlx5_1, cores 4-7\n" in said
    assert "4 in the order given, 2 in this one; no order has fewer than 2\nfabric: topology.conf" in said
    assert "  NCCL_IB_HCA==mlx5_0,mlx5_1\n" in said
    assert "  rank 1: UCX_NET_DEVICES=mlx5_1:1" in said
    assert "  NCCL_SOCKET_IFNAME==ib0\n" in said


def test_json_is_the_plan(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "digits", "--fabric", "topology.conf", "--nodes", "2", "-np", "4", "--json"]) == 0
    plan = Plan.model_validate_json(capsys.readouterr().out)
    assert [(host.host, host.slots) for host in plan.hosts] == [("n1", 2), ("n2", 2)]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--fabric", "topology.conf", "--hosts", "n[1-5]"], "the fabric has no host 'n5'"),
        (["--hosts", "n[1-5"], "--hosts: 'n[1-5' is not a list of hosts"),
        (["--hosts", "n[1-2]", "-np", "3"], "-np 3: 2 hosts cannot have equally many ranks"),
        (["--nodes", "2"], "--nodes 2: this machine has 1 host"),
        (["--fabric", "fabric.txt", "--hosts", "n1"], "fabric.txt"),
        (["--node", "nodes.txt"], "cannot read nodes.txt"),
        (["--node", "node.txt", "-np", "3"], "3 ranks for 2 GPUs"),
        (["-np", "0"], "-np 0: a run has at least one rank"),
    ],
)
def test_misuse(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "digits", *arguments]) == 2
    captured = capsys.readouterr()
    assert said in captured.err
    assert captured.out == ""


def test_one_host_elsewhere_is_reached_by_mpirun(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hpctrain.launch.launcher_choice.find_mpi", lambda: OPEN_MPI)
    monkeypatch.setattr("hpctrain.supervision.start.require", lambda framework: None)
    run = ["run", "digits", "--dry-run", "--run-dir", "run"]
    assert main([*run, "--hosts", "n1"]) == 0
    assert "  --host n1:1 " in capsys.readouterr().out
    assert main([*run, "--hosts", socket.gethostname()]) == 0
    assert "--host" not in capsys.readouterr().out
    assert main([*run, "--hosts", "n1", "--backend", "single"]) == 2
    assert f"on this machine, {socket.gethostname()}, not on n1" in capsys.readouterr().err
    monkeypatch.setenv("SLURM_JOB_NODELIST", "n[1-2]")
    assert main(run) == 0
    assert "  --host n1:1,n2:1 " in capsys.readouterr().out


def test_run_takes_the_same_hosts(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hpctrain.supervision.one_run.available_launcher", lambda plan, machine: OPEN_MPI)
    options = ["--fabric", "topology.conf", "--hosts", "n[1-4]", "--node", "node.txt", "--dry-run", "--run-dir", "run"]
    assert main(["run", "digits", *options]) == 0
    said = capsys.readouterr().out
    assert "  --host n1:2,n3:2,n2:2,n4:2 \\\n  --bind-to none \\\n  --map-by slot \\\n" in said
