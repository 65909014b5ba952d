"""Training on a real Slurm: submitted, launched, watched, recovered and cancelled."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from support.launching import Launch
from support.slurm.local_slurm import LocalSlurm
from support.slurm.submitted_runs import SIZE, TWO_NODES, Submit, events, held, jobs_of, wait_for_step

pytestmark = pytest.mark.slow

WHERE = """\
import os, sys
import hpctrain as ht

comm = ht.init()
names = comm.allgather_object(os.environ["SLURMD_NODENAME"])
odd = comm.allgather_object(os.environ.get("ODD"))
if comm.rank == 0:
    print("order", *names)
    print("odd", odd == [sys.argv[1]] * comm.size)
"""
ODD = "a,b c\n'quoted' \"twice\" $(touch pwned) ; touch pwned `touch pwned` \\n #x"


def test_trains_on_two_nodes(submit: Submit, slurm_hpctrain: Launch, tmp_path: Path) -> None:
    result = submit("digits", *TWO_NODES, "--launcher", "mpirun", "--run-dir", "run", "--wait")
    assert result.returncode == 0, result.stdout
    run = tmp_path / "run"
    summary = json.loads((run / "summary.json").read_text())
    assert (summary["status"], summary["ranks"], summary["backend"]) == ("done", 2, "mpi")
    assert summary["metrics"]["test_accuracy"] >= 0.975
    assert f"test accuracy {summary['metrics']['test_accuracy']:.4f}\n" in result.stdout
    (job,) = jobs_of(run)
    for name in ("run", job):
        said = slurm_hpctrain("status", name, "--json")
        assert said.returncode == 0, said.stdout
        assert json.loads(said.stdout)["state"] == "done"
    logs = slurm_hpctrain("logs", job)
    assert logs.returncode == 0
    assert "2 ranks," in logs.stdout and "backend mpi (no GPU on" in logs.stdout


@pytest.mark.long
def test_ranks_are_in_the_order_of_the_placement(submit: Submit, tmp_path: Path) -> None:
    """n1 and n3 share a leaf, n2 and n4 another: sorted names cross between them at every step."""
    script = tmp_path / "where.py"
    script.write_text(WHERE)
    options = ["--cluster", "auto", "--nodes", "4", "--tasks-per-node", "1", "--gpus-per-node", "0"]
    options += ["--launcher", "mpirun", "--env", f"ODD={ODD}", "--run-dir", "run", "--wait"]
    result = submit("where.py", *options, "--", ODD)
    assert result.returncode == 0, result.stdout
    log = (tmp_path / "run" / "logs" / "rank-0.log").read_text()
    names = re.findall(r"^order (.*)$", log, re.M)[0].split()
    plan = json.loads((tmp_path / "run" / "plan.json").read_text())
    assert names == [host["host"] for host in plan["hosts"]]
    assert {frozenset(names[:2]), frozenset(names[2:])} == {frozenset(("n1", "n3")), frozenset(("n2", "n4"))}
    assert (plan["host_order"]["crossings_given"], plan["host_order"]["crossings"]) == (4, 2)
    assert "odd True" in log
    assert not list(tmp_path.rglob("pwned"))


@pytest.fixture
def lose_node(slurm: LocalSlurm, submit: Submit) -> Iterator[Callable[[str], None]]:
    """``lose_node("n3")`` as if it lost its power; it is there again after the test, before ``submit`` looks."""
    lost: list[str] = []

    def lose(node: str) -> None:
        slurm.lose_node(node)
        lost.append(node)
        # At once, not after some seconds of silence: it is this that ends a job.
        slurm.run("scontrol", "update", f"NodeName={node}", "State=DOWN", "Reason=lost")

    yield lose
    for node in lost:
        slurm.start_slurmd(node)


@pytest.mark.long
def test_a_run_goes_on_without_a_lost_node(
    slurm: LocalSlurm, submit: Submit, lose_node: Callable[[str], None], tmp_path: Path
) -> None:
    """In the same job, if that is kept, by the same launcher, from the newest checkpoint."""
    run = tmp_path / "run"
    three = ("--cluster", "auto", "--nodes", "3", *SIZE[2:])
    settings = (
        "--backend",
        "mpi",
        "--launcher",
        "mpirun",
        "--set",
        "epochs=6",
        "--set",
        "fault_tolerance.lost_rank=shrink",
    )
    said = submit("digits", *three, *settings, "--run-dir", "run")
    assert said.returncode == 0, said.stdout
    (job,) = jobs_of(run)
    wait_for_step(run, 30)
    nodes = [host["host"] for host in json.loads((run / "plan.json").read_text())["hosts"]]
    lost = next(node for node in nodes if node != slurm.job(job)["BatchHost"])
    with held(run):
        lose_node(lost)
    ended = slurm.wait_for(job, "COMPLETED", "FAILED", "NODE_FAIL", "PENDING")
    log = "".join(path.read_text() for path in run.glob("logs/job-*.log"))
    assert (ended["JobState"], ended["Restarts"]) == ("COMPLETED", "0"), log
    first, second = events(run, "start")
    assert (first["iteration"], first["pid"], second["iteration"] >= 23) == (0, second["pid"], True)
    assert set(second["hosts"]) == set(nodes) - {lost}
    assert f"host {lost} " in log and f"step {second['iteration']}" in log
    plan = json.loads((run / "plan.json").read_text())
    assert (plan["ranks"], plan["begun_ranks"]) == (2, 3)
    summary = json.loads((run / "summary.json").read_text())
    assert (summary["status"], summary["ranks"]) == ("done", 2)
    assert [fault["host"] for fault in summary["survived"] if fault["rank"] is None] == [lost]
    assert summary["metrics"]["test_accuracy"] >= 0.97


def test_cancelled_is_cancelled(slurm: LocalSlurm, submit: Submit, slurm_hpctrain: Launch, tmp_path: Path) -> None:
    submit("digits", *TWO_NODES, "--set", "epochs=1000", "--run-dir", "run")
    run = tmp_path / "run"
    (job,) = jobs_of(run)
    wait_for_step(run, 20)
    said = slurm_hpctrain("cancel", "run")
    assert said.returncode == 0, said.stdout
    slurm.wait_idle()
    # Its ranks have left by themselves, after they saved their state, unless Slurm was quicker.
    assert slurm.job(job)["JobState"] in ("FAILED", "CANCELLED")
    assert slurm.job(job)["Restarts"] == "0", "it did not come back"
    assert json.loads(slurm_hpctrain("status", "run", "--json").stdout)["state"] == "resumable"
    assert [*(run / "checkpoints").glob("step-*")]
