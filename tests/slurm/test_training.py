"""Training on a real Slurm: submitted, launched, stopped, requeued, resumed, watched and cancelled."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest
from launching import Launch
from local_slurm import LocalSlurm

from hpctrain.records import read_records
from hpctrain.rundir import RunDirectory

pytestmark = pytest.mark.slow

# One core a rank, as on the machine that the uninterrupted run has to itself: threads decide the last bits.
SIZE = ("--nodes", "2", "--tasks-per-node", "1", "--cpus-per-task", "1", "--gpus-per-node", "0")
TWO_NODES = ("--cluster", "auto", *SIZE)
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

Submit = Callable[..., CompletedProcess[str]]


@pytest.fixture
def submit(slurm: LocalSlurm, slurm_hpctrain: Launch) -> Iterator[Submit]:
    """``submit("digits", …)``; what still runs of it is cancelled behind the test."""
    yield lambda *arguments, timeout=300: slurm_hpctrain("submit", *arguments, timeout=timeout)
    slurm.run("scancel", "--user=root", "--full")
    slurm.wait_idle()


def jobs_of(run: Path) -> list[str]:
    return [str(job) for job in json.loads((run / "submission.json").read_text())["jobs"]]


def events(run: Path, kind: str) -> list[dict[str, Any]]:
    lines = (run / "events.jsonl").read_text().splitlines()
    return [event for event in map(json.loads, lines) if event["event"] == kind]


def wait_until(what: str, condition: Callable[[], bool], timeout: float = 120) -> None:
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, f"waited {timeout:g} s for {what}"
        time.sleep(0.2)


def wait_for_step(run: Path, iteration: int) -> None:
    path = run / "events.jsonl"
    wait_until(f"step {iteration}", lambda: path.exists() and len(events(run, "step")) >= iteration)


def wait_for_attempt(run: Path, number: int) -> None:
    """Until its ranks train."""
    path = run / "events.jsonl"
    wait_until(f"attempt {number}", lambda: path.exists() and len(events(run, "run")) >= number)


def wait_for_end(run: Path, timeout: float = 240) -> dict[str, object]:
    """The summary of a run that is done."""
    path = run / "summary.json"
    wait_until(
        "the end of the run", lambda: path.exists() and json.loads(path.read_text())["status"] == "done", timeout
    )
    return json.loads(path.read_text())


def newest_state(run: Path) -> bytes:
    return (max((run / "checkpoints").glob("step-*")) / "state.safetensors").read_bytes()


@pytest.mark.parametrize(
    ("launcher", "asked", "backend"), [("mpirun", "auto", "mpi (no GPU on"), ("srun-pmix", "gloo", "gloo (asked for)")]
)
def test_trains_on_two_nodes(
    submit: Submit, slurm_hpctrain: Launch, tmp_path: Path, launcher: str, asked: str, backend: str
) -> None:
    options = ("--launcher", launcher, "--backend", asked, "--run-dir", "run", "--wait")
    result = submit("digits", *TWO_NODES, *options)
    assert result.returncode == 0, result.stdout
    run = tmp_path / "run"
    summary = json.loads((run / "summary.json").read_text())
    assert (summary["status"], summary["ranks"], summary["backend"]) == ("done", 2, backend.split()[0])
    assert summary["metrics"]["test_accuracy"] >= 0.975
    (job,) = jobs_of(run)
    for name in ("run", job):
        said = slurm_hpctrain("status", name, "--json")
        assert said.returncode == 0, said.stdout
        assert json.loads(said.stdout)["state"] == "done"
    logs = slurm_hpctrain("logs", job)
    assert logs.returncode == 0
    assert f"2 ranks, backend {backend}" in logs.stdout


@pytest.mark.parametrize("launcher", ["mpirun", "srun-pmix"])
def test_ranks_are_in_the_order_of_the_placement(submit: Submit, tmp_path: Path, launcher: str) -> None:
    """n1 and n3 share a leaf, n2 and n4 another: sorted names cross between them at every step."""
    script = tmp_path / "where.py"
    script.write_text(WHERE)
    options = ["--cluster", "auto", "--nodes", "4", "--tasks-per-node", "1", "--gpus-per-node", "0"]
    options += ["--launcher", launcher, "--env", f"ODD={ODD}", "--run-dir", "run", "--wait"]
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


# The end of a job is announced at the first look at its limit, up to 30 s after it began.
BRIEF = """\
name: brief
source: the tests
time: "1"
signal_seconds: 40
"""
SHORT = 30


@pytest.fixture
def brief(tmp_path: Path) -> tuple[str, ...]:
    """Options for jobs on two nodes whose time is too short."""
    (tmp_path / "brief.yaml").write_text(BRIEF)
    return ("--cluster", "brief.yaml", *SIZE)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The final state of ``SHORT`` epochs on two ranks of this machine, never stopped."""
    program = str(Path(sys.executable).parent / "hpctrain")
    folder = tmp_path_factory.mktemp("uninterrupted")
    command = [program, "run", "digits", "-np", "2", "--set", f"epochs={SHORT}", "--run-dir", "run"]
    subprocess.run(command, cwd=folder, check=True, timeout=300)
    return newest_state(folder / "run")


def train_slowly(run: Path, attempt: int) -> None:
    """Let an attempt make some steps, and then none until the end of its job is announced."""
    wait_for_attempt(run, attempt)
    wait_for_step(run, len(events(run, "step")) + 5)
    ranks = [process for record in read_records(RunDirectory(run)).values() if (process := record.process())]
    assert len(ranks) == 2
    for rank in ranks:
        rank.suspend()
    try:
        wait_until("the announcement", (run / "stop").exists)
    finally:
        for rank in ranks:
            rank.resume()


def test_a_job_whose_time_is_too_short_requeues_itself(
    slurm: LocalSlurm, submit: Submit, tmp_path: Path, brief: tuple[str, ...], uninterrupted: bytes
) -> None:
    run = tmp_path / "run"
    options = ("--set", f"epochs={SHORT}", "--run-dir", "run", "--wait")
    with ThreadPoolExecutor(1) as waiting:
        submitted = waiting.submit(submit, "digits", *brief, *options, timeout=500)
        for attempt in (1, 2):
            train_slowly(run, attempt)
        result = submitted.result()
    assert result.returncode == 0, result.stdout
    assert json.loads((run / "summary.json").read_text())["status"] == "done"
    starts = [event["iteration"] for event in events(run, "start")]
    assert len(starts) >= 3, f"requeued {len(starts) - 1} times"
    assert starts == sorted(set(starts)), "each part got further"
    assert newest_state(run) == uninterrupted
    (log,) = (run / "logs").glob("job-*.log")
    # On a busy machine a part may be over before its ranks start.
    requeued = log.read_text().count("goes back to the queue")
    assert requeued >= len(starts) - 1
    assert requeued == int(slurm.job(*jobs_of(run))["Restarts"])


def test_three_jobs_of_a_chain_are_one_training(
    slurm: LocalSlurm, submit: Submit, tmp_path: Path, brief: tuple[str, ...], uninterrupted: bytes
) -> None:
    options = ["--time", "10", "--chain", "3", "--run-dir", "run"]
    result = submit("digits", *brief, "--set", f"epochs={SHORT}", *options)
    assert result.returncode == 0, result.stdout
    run = tmp_path / "run"
    jobs = jobs_of(run)
    assert len(jobs) == 3
    # The limit is looked at too seldom to foresee how far each job comes, so the first two are told by hand.
    for attempt, job in enumerate(jobs[:2], start=1):
        wait_for_attempt(run, attempt)
        slurm.run("scancel", "--batch", "--signal=USR2", job)
        slurm.wait_for(job, "FAILED")
    slurm.wait_for(jobs[2], "COMPLETED", "FAILED", "TIMEOUT", timeout=240)
    wait_for_end(run, 1)
    assert [event["job"] for event in events(run, "start")] == jobs
    assert newest_state(run) == uninterrupted


def test_the_signal_to_every_process_of_a_job(
    slurm: LocalSlurm, submit: Submit, tmp_path: Path, brief: tuple[str, ...], uninterrupted: bytes
) -> None:
    """``scancel --signal`` goes to the tasks of srun, that is the ranks, and to none of the batch script."""
    submit("digits", *brief, "--set", f"epochs={SHORT}", "--time", "10", "--launcher", "srun-pmix", "--run-dir", "run")
    run = tmp_path / "run"
    (job,) = jobs_of(run)
    wait_for_step(run, 20)
    slurm.run("scancel", "--signal=USR2", job)
    wait_for_end(run)
    assert len(events(run, "start")) == 2
    assert newest_state(run) == uninterrupted


def test_requeued_by_the_administrator(
    slurm: LocalSlurm, submit: Submit, tmp_path: Path, brief: tuple[str, ...], uninterrupted: bytes
) -> None:
    submit("digits", *brief, "--set", f"epochs={SHORT}", "--time", "10", "--run-dir", "run")
    run = tmp_path / "run"
    (job,) = jobs_of(run)
    wait_for_step(run, 20)
    slurm.run("scontrol", "requeue", job)
    wait_for_end(run)
    assert newest_state(run) == uninterrupted


def test_one_node_loses_its_ranks(
    slurm: LocalSlurm, submit: Submit, tmp_path: Path, brief: tuple[str, ...], uninterrupted: bytes
) -> None:
    """mpirun itself exits 0 then."""
    submit("digits", *brief, "--set", f"epochs={SHORT}", "--time", "10", "--launcher", "mpirun", "--run-dir", "run")
    run = tmp_path / "run"
    (job,) = jobs_of(run)
    wait_for_step(run, 20)
    nodes = [host["host"] for host in json.loads((run / "plan.json").read_text())["hosts"]]
    steps = re.findall(rf"^{job}\.(\d+)", slurm.run("squeue", "--steps", "--noheader", "--format=%i"), re.M)
    slurm.kill_step(job, max(steps, key=int), nodes[1])
    wait_for_end(run)
    assert events(run, "fault")
    assert newest_state(run) == uninterrupted


@pytest.fixture
def lose_node(slurm: LocalSlurm, submit: Submit) -> Iterator[Callable[[str], None]]:
    """``lose_node("n3")`` as if it lost its power; it is there again behind the test, before ``submit`` looks."""
    lost: list[str] = []

    def lose(node: str) -> None:
        slurm.lose_node(node)
        lost.append(node)
        # At once, not after some seconds of silence: it is this that ends a job.
        slurm.run("scontrol", "update", f"NodeName={node}", "State=DOWN", "Reason=lost")

    yield lose
    for node in lost:
        slurm.start_slurmd(node)


def test_ranks_that_heal_go_on_without_a_lost_node(
    slurm: LocalSlurm, submit: Submit, lose_node: Callable[[str], None], tmp_path: Path
) -> None:
    """In the same job, by the same launcher, from the newest checkpoint."""
    run = tmp_path / "run"
    four = ("--cluster", "auto", "--nodes", "4", *SIZE[2:])
    settings = ("--backend", "mpi", "--set", "fault_tolerance=shrink", "--set", "epochs=10")
    said = submit("digits", *four, *settings, "--run-dir", "run")
    assert said.returncode == 0, said.stdout
    (job,) = jobs_of(run)
    wait_for_step(run, 30)
    nodes = [host["host"] for host in json.loads((run / "plan.json").read_text())["hosts"]]
    lost = next(node for node in nodes if node != slurm.job(job)["BatchHost"])
    lose_node(lost)
    ended = slurm.wait_for(job, "COMPLETED", "FAILED", "NODE_FAIL", "PENDING")
    log = "".join(path.read_text() for path in run.glob("logs/job-*.log"))
    assert (ended["JobState"], ended["Restarts"]) == ("COMPLETED", "0"), log
    first, second = events(run, "start")
    assert (first["iteration"], first["pid"], second["iteration"] >= 23) == (0, second["pid"], True)
    assert set(second["hosts"]) == set(nodes) - {lost}
    assert f"host {lost} was lost, and its ranks with it; going on from step {second['iteration']}" in log
    plan = json.loads((run / "plan.json").read_text())
    assert (plan["ranks"], plan["begun_ranks"]) == (3, 4)
    summary = json.loads((run / "summary.json").read_text())
    assert (summary["status"], summary["ranks"]) == ("done", 3)
    assert [fault["host"] for fault in summary["survived"] if fault["rank"] is None] == [lost]
    assert summary["metrics"]["test_accuracy"] >= 0.97


def test_cancelled_is_cancelled(slurm: LocalSlurm, submit: Submit, slurm_hpctrain: Launch, tmp_path: Path) -> None:
    submit("digits", *TWO_NODES, "--set", "epochs=1000", "--run-dir", "run")
    run = tmp_path / "run"
    (job,) = jobs_of(run)
    wait_for_step(run, 20)
    said = slurm_hpctrain("cancel", "run")
    assert said.returncode == 0, said.stdout
    slurm.wait_for(job, "CANCELLED")
    slurm.wait_idle()
    assert slurm.job(job)["JobState"] == "CANCELLED", "it did not come back"
    assert json.loads(slurm_hpctrain("status", "run", "--json").stdout)["state"] in ("resumable", "stopped")


def test_a_run_that_fails_is_not_requeued(slurm: LocalSlurm, submit: Submit, tmp_path: Path) -> None:
    (tmp_path / "fails.py").write_text("import hpctrain as ht\nif ht.init().rank == 1:\n    raise ValueError('boom')\n")
    result = submit("fails.py", *TWO_NODES, "--run-dir", "run", "--wait")
    assert result.returncode == 1, result.stdout
    assert "ValueError: boom" in result.stdout
    (job,) = jobs_of(tmp_path / "run")
    assert slurm.job(job)["JobState"] == "FAILED"
    assert slurm.job(job)["Restarts"] == "0"
