"""``hpctrain plan``."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from hpctrain.cli.main import main
from hpctrain.common.cluster.mpi import MpiInstallation
from hpctrain.common.run.plan import Plan
from support.golden import check_text
from support.refusals import codes
from support.topology.two_switches import NODE, TREE

OPEN_MPI = MpiInstallation(flavour="open-mpi-5", version="5.0", mpirun=Path("/mpi/mpirun"))


@pytest.fixture(autouse=True)
def _files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("hpctrain.common.cluster.programs.shutil.which", lambda program, path=None: None)
    Path("topology.conf").write_text(TREE)
    Path("node.txt").write_text(NODE)


def test_text(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--fabric", "topology.conf", "--hosts", "n[1-4]", "--node", "node.txt", "--interface", "ib0"]
    assert main(["plan", "digits", *options]) == 0
    said = capsys.readouterr().out
    # One rank a GPU; each with the adapter and the cores that are near to it.
    check_text("plan", said.partition("\nenvironment")[0])
    assert "  NCCL_IB_HCA==mlx5_0,mlx5_1\n" in said
    assert "1: UCX_NET_DEVICES=mlx5_1:1" in said
    assert "  NCCL_SOCKET_IFNAME==ib0\n" in said


def test_json_is_the_plan(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "digits", "--fabric", "topology.conf", "--nodes", "2", "-np", "4", "--json"]) == 0
    plan = Plan.model_validate_json(capsys.readouterr().out)
    assert [(host.host, host.slots) for host in plan.hosts] == [("n1", 2), ("n2", 2)]


def test_ranks_are_placed_without_the_data(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "gpt2-124m", "-np", "240", "--json"]) == 0
    assert Plan.model_validate_json(capsys.readouterr().out).ranks == 240
    # Where they would start, the data is asked for.
    assert main(["run", "gpt2-124m", "-np", "2", "--dry-run"]) == 2


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--fabric", "topology.conf", "--hosts", "n[1-5]"], "the fabric has no host 'n5'"),
        (["--hosts", "n[1-5"], "HT-hosts-not-a-list"),
        (["--hosts", "n[1-2]", "-np", "3"], "HT-ranks-not-divisible"),
        (["--nodes", "2"], "HT-hosts-too-few"),
        (["--fabric", "fabric.txt", "--hosts", "n1"], "fabric.txt"),
        (["--node", "nodes.txt"], "HT-file-unreadable"),
        (["--node", "node.txt", "-np", "3"], "HT-gpus-too-few"),
        (["-np", "0"], "-np 0: a run needs at least one rank"),
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
    monkeypatch.setattr("hpctrain.control.launchers.launcher_choice.find_mpi", lambda: OPEN_MPI)
    monkeypatch.setattr("hpctrain.control.supervision.start.require", lambda framework: None)
    run = ["run", "digits", "--dry-run", "--run-dir", "run"]
    assert main([*run, "--hosts", "n1"]) == 0
    assert "  --host n1:1 " in capsys.readouterr().out
    assert main([*run, "--hosts", socket.gethostname()]) == 0
    assert "--host" not in capsys.readouterr().out
    assert main([*run, "--hosts", "n1", "--backend", "single"]) == 2
    said = capsys.readouterr().err
    assert codes(said) == ["HT-backend-unfit"] and socket.gethostname() in said
    monkeypatch.setenv("SLURM_JOB_NODELIST", "n[1-2]")
    assert main(run) == 0
    assert "  --host n1:1,n2:1 " in capsys.readouterr().out


MESH = ["plan", "digits", "-np", "8", "--fabric", "topology.conf", "--hosts", "n[1-4]", "--mesh", "dp_shard=4"]


def test_a_mesh_in_text(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*MESH, "--set", "sharding.zero=2"]) == 0
    said = capsys.readouterr().out
    # 89,930 parameters: gathered once and scattered over 4 ranks, 3/4 x 8 bytes of each; a quarter summed over 2 ranks.
    # n1, n2 and n3, n4 are on different leaves; n1, n3 and n2, n4 are on one.
    check_text("plan-mesh", said.partition("\nenvironment")[0])
    assert "  HPCTRAIN_MESH=dp_replicate=2,dp_shard=4,pp=1,cp=1,tp=1\n  MALLOC_MMAP_THRESHOLD_=131072" in said
