"""The state of jobs on a real Slurm, and the commands that name them."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hpctrain.control.schedulers.jobs import JobState
from hpctrain.control.schedulers.slurm.queue import job_states
from support.launching import Launch
from support.report.written_runs import recipe_plan, write_run
from support.schedulers.slurm_programs import write_submission
from support.slurm.local_slurm import LocalSlurm

Submit = Callable[..., str]


@pytest.fixture(autouse=True)
def _client(slurm: LocalSlurm, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in slurm.environment.items():
        monkeypatch.setenv(name, value)
    # What a user may have in a profile.
    monkeypatch.setenv("SQUEUE_FORMAT", "%i")
    monkeypatch.setenv("SQUEUE_STATES", "PENDING")


@pytest.fixture
def submit(slurm: LocalSlurm, tmp_path: Path) -> Iterator[Submit]:
    """Submits a command, or a script, and cancels what is left of it."""
    jobs: list[str] = []

    def submit(work: str | Path, *options: str, chdir: Path = tmp_path) -> str:
        arguments = ("--parsable", f"--chdir={chdir}", "--output=/dev/null", *options)
        jobs.append(slurm.run("sbatch", *arguments, str(work) if isinstance(work, Path) else f"--wrap={work}").strip())
        return jobs[-1]

    yield submit
    for job in jobs:
        slurm.run("scancel", job, check=False)


def job_state(number: str) -> JobState | None:
    return next(iter(job_states([number])), None)


def wait_for(job: str, state: str, seconds: float = 60) -> JobState:
    deadline = time.monotonic() + seconds
    while (found := job_state(job)) is None or found.state != state:
        assert time.monotonic() < deadline, f"job {job} is not {state} within {seconds} s: {found}"
        time.sleep(0.2)
    return found


def test_a_job_from_waiting_to_cancelled(slurm: LocalSlurm, submit: Submit, tmp_path: Path) -> None:
    odd = tmp_path / "odd dir|=\n$(x) StdErr=y"
    odd.mkdir()
    job = submit("sleep 300", "--begin=now+1hour", "--time=0:30:00", "--job-name=x JobState=RUNNING", chdir=odd)
    waiting = wait_for(job, "PENDING")
    assert waiting.waits and waiting.directory == odd and waiting.limit_seconds == 1800 and waiting.nodes == ""
    assert waiting.reason == "BeginTime" and waiting.start is not None and waiting.start > time.time() + 3000
    slurm.run("scontrol", "update", f"JobId={job}", "StartTime=now", "TimeLimit=5")
    running = wait_for(job, "RUNNING")
    assert not running.waits and running.nodes.startswith("n") and running.limit_seconds == 300
    assert running.start is not None and abs(running.start - time.time()) < 60
    slurm.run("scancel", job)
    assert not wait_for(job, "CANCELLED").live


def test_how_jobs_end(submit: Submit) -> None:
    failed, killed, done = submit("exit 7"), submit("kill -9 $$"), submit("true")
    assert wait_for(failed, "FAILED").exit_code == 7
    assert wait_for(killed, "FAILED").signal == 9
    assert wait_for(done, "COMPLETED").exit_code == 0
    assert [job.id for job in job_states([done, failed])] == [failed, done]


def test_an_array(slurm: LocalSlurm, submit: Submit) -> None:
    job = submit("[ $SLURM_ARRAY_TASK_ID = 1 ] || sleep 300", "--array=1-5%1")
    wait_for(f"{job}_1", "COMPLETED")
    wait_for(f"{job}_2", "RUNNING")
    tasks = job_states([job])
    assert sorted(task.state for task in tasks) == ["COMPLETED", "PENDING", "RUNNING"]
    assert {task.reason for task in tasks if task.waits} == {"JobArrayTaskLimit"}


def test_a_job_that_slurm_does_not_know() -> None:
    assert job_state("4000000") is None
    assert job_states(["4000000", "4000001"]) == []


def test_status_and_cancel_by_number_and_by_directory(submit: Submit, slurm_main: Launch, tmp_path: Path) -> None:
    directory = write_run(tmp_path / "my run", recipe_plan(), None)
    directory.script.write_text("#!/bin/bash\nsleep 300\n")
    job = submit(directory.script, chdir=directory.path)
    follow_up = submit(directory.script, f"--dependency=afterany:{job}", chdir=directory.path)
    other = submit("sleep 300", chdir=directory.path)
    write_submission(directory, job)
    wait_for(job, "RUNNING")
    for target in (job, follow_up, str(directory.path)):
        status = json.loads(slurm_main("status", target, "--json").stdout)
        assert (status["state"], status["run_dir"]) == ("running", str(directory.path))
        assert [(each["id"], each["state"]) for each in status["jobs"]] == [(job, "RUNNING"), (follow_up, "PENDING")]
    cancelled = slurm_main("cancel", job)
    assert cancelled.returncode == 0
    assert f"job {follow_up}, " in cancelled.stdout and "PENDING" in cancelled.stdout
    assert {each.state for each in job_states([job, follow_up])} == {"CANCELLED"}
    # Of another job in the same directory only Slurm knows what it is for.
    assert all(each.live for each in job_states([other]))
    again = slurm_main("cancel", str(directory.path))
    assert again.returncode == 0 and "which was" not in again.stdout
