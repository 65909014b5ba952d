"""How a run is, from its events and its jobs."""

from __future__ import annotations

import contextlib
import os
import re
import socket
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from hpctrain.common.run.directory import RunDirectory
from hpctrain.common.run.records import holding
from hpctrain.control.schedulers.jobs import JobState
from hpctrain.control.schedulers.run_jobs import find_run, last_words, may_go_on
from hpctrain.report.page import render
from hpctrain.report.record import Record
from hpctrain.report.status import KnownRun, RunStatus, read_status
from support.report.written_runs import Line, recipe_plan, run_events, write_run

# Of run_events: the time of the last event of its second epoch.
NOW = 1_700_000_012.0


def start(**changes: Any) -> Line:
    return {
        "time": 1_699_999_999.0,
        "event": "start",
        "attempt": 1,
        "iteration": 0,
        "job": "12",
        "launcher": "mpirun",
        "hosts": ["n1", "n3"],
        "pid": 1,
        "host": "n1",
        **changes,
    }


def job(**changes: Any) -> JobState:
    values: dict[str, Any] = {
        "id": "12",
        "state": "RUNNING",
        "reason": "",
        "start": NOW - 20,
        "seconds": 20,
        "limit_seconds": 25,
        "nodes": "n[1,3]",
        "exit_code": 0,
        "signal": 0,
        "command": "/run/job.sh",
        "directory": Path("/run"),
    }
    return JobState(**{**values, **changes})


def known(tmp_path: Path, events: list[Line], **changes: Any) -> RunStatus:
    directory = RunDirectory(tmp_path / "run")
    if not directory.plan.exists():
        write_run(directory.path, recipe_plan(), events)
    values: dict[str, Any] = {
        "directory": directory,
        "plan": recipe_plan(),
        "record": Record(directory),
        "jobs": [job()],
        "job_ids": ("12",),
        "summary": None,
        "alive": False,
    }
    return KnownRun(**{**values, **changes}).status(NOW)


def test_a_running_job(tmp_path: Path) -> None:
    status = known(tmp_path, [start(), *run_events(2)])
    assert (status.state, status.attempt, status.hosts, status.message) == ("running", 1, ("n1", "n3"), "")
    assert (status.step, status.steps, status.epoch, status.epochs) == (8, 12, 2, 3)
    assert (status.step_loss, status.test_accuracy, status.samples_per_s) == (0.25, 0.85, 128.0)
    # Steps 2 to 8 are at 2, 3, 4, 6 … 9 s: the end of an epoch lies between two of them.
    assert status.step_seconds == pytest.approx(7 / 6)
    assert status.remaining_s == pytest.approx(4 * 7 / 6)
    assert status.job_remaining_s == 5
    assert (status.elapsed_s, status.last_event_s, status.silent) == (13.0, 2.0, False)


@pytest.mark.parametrize(
    ("jobs", "summary", "alive", "state"),
    [
        ([job(state="COMPLETING")], "done", False, "done"),
        ([job()], "resumable", False, "running"),
        ([job(), job(id="13", state="PENDING", nodes="")], None, False, "running"),
        ([job(state="TIMEOUT"), job(id="13", state="PENDING", nodes="")], "resumable", False, "waiting"),
        ([job(state="COMPLETED")], "resumable", False, "resumable"),
        ([job(state="FAILED")], "failed", False, "failed"),
        ([job(state="NODE_FAIL")], None, False, "stopped"),
        ([job(state="CANCELLED")], "resumable", False, "resumable"),
        ([job(state="CANCELLED")], None, False, "stopped"),
        ([], None, False, "stopped"),
        ([], None, True, "running"),
        ([], None, None, "running"),
    ],
)
def test_states(jobs: list[JobState], summary: str | None, alive: bool | None, state: str, tmp_path: Path) -> None:
    status = known(tmp_path, [start(), *run_events(1)], jobs=jobs, summary=summary, alive=alive)
    assert status.state == state
    resume = f"hpctrain run --resume --run-dir {tmp_path}/run"
    assert status.resume == (resume if state in ("resumable", "stopped") else None)


@pytest.mark.parametrize("alive", [False, None])
@pytest.mark.parametrize("outcome", ["done", "failed", "resumable"])
def test_the_events_say_how_it_ended_where_no_summary_could_be_written(
    tmp_path: Path, outcome: str, alive: bool | None
) -> None:
    end = {"time": NOW, "event": "end", "status": outcome}
    status = known(tmp_path, [start(), *run_events(1), end], jobs=[], alive=alive)
    assert (status.state, status.resume is not None) == (outcome, outcome == "resumable")
    begun = known(tmp_path / "again", [start(), end, start(attempt=2)], jobs=[], alive=alive)
    assert begun.state == ("running" if alive is None else "stopped")


def test_what_it_says_of_each_state(tmp_path: Path) -> None:
    fault = {"time": NOW, "event": "fault", "rank": 1, "host": "n3", "message": "rank 1 on n3 failed: OOM"}
    events = [start(), *run_events(1), fault]
    assert known(tmp_path / "a", events, jobs=[], summary="failed").message.endswith(" failed: OOM")
    pending = job(state="PENDING", nodes="", reason="Resources", start=1_700_000_000)
    waits = known(tmp_path / "b", events, jobs=[pending]).message
    told = "12 .*Resources; .* 20"
    assert re.search(told, waits)
    ended = job(state="TIMEOUT", reason="TimeLimit")
    ended_message = known(tmp_path / "c", events, jobs=[ended]).message
    assert " 12 " in ended_message and "TIMEOUT (TimeLimit)" in ended_message
    assert " n1" in known(tmp_path / "d", events, jobs=[], alive=None).message


def test_the_reason_in_a_jobs_log(tmp_path: Path) -> None:
    """Of the run's last job that has one: the last error of hpctrain, else the last line, of a file of any size."""
    logs = tmp_path / "run" / "logs"
    logs.mkdir(parents=True)
    (logs / "job-12.log").write_text("error[HT-of-another-job]: x\n")
    (logs / "job-13.log").write_bytes(b"\xff" * 200_000 + b"\nslurmstepd: \x1b[31mexec failed\n\n")
    jobs = [job(state="FAILED"), job(id="13", state="FAILED")]
    message = known(tmp_path, [], jobs=jobs, job_ids=("12", "13", "14")).message
    assert message.endswith(f"slurmstepd: \\u001b[31mexec failed ({logs}/job-13.log)")
    with (logs / "job-13.log").open("a") as file:
        file.write("error[HT-launcher-none-installed]: none works\n  mend it\n")
    assert (
        f"error[HT-launcher-none-installed]: none works ({logs}/job-13.log)"
        in known(tmp_path, [], jobs=jobs, job_ids=("12", "13")).message
    )
    status = known(tmp_path, [], jobs=[], job_ids=("13",))
    assert "HT-launcher-none-installed" in status.message and status.resume is None
    assert "HT-launcher-none-installed" in render(RunDirectory(tmp_path / "run"))
    assert not may_go_on(None, last_words(RunDirectory(tmp_path / "run")))
    for last in ("stopped[HT-disk-full]: no space", "out of memory"):
        (logs / "job-13.log").write_text(f"{last}\n")
        assert may_go_on(None, last_words(RunDirectory(tmp_path / "run")))
        assert known(tmp_path, [], jobs=[], job_ids=("13",)).resume
    # The page of a run that may still go on does not take any line for an error.
    assert "out of memory" not in render(RunDirectory(tmp_path / "run"))


def test_a_start_takes_back_what_was_lost(tmp_path: Path) -> None:
    # Interrupted after step 8, resumed from the checkpoint of step 5: the second epoch is done again.
    resumed = start(attempt=2, iteration=5, job="13", time=NOW)
    status = known(tmp_path / "a", [start(), *run_events(2), resumed])
    assert (status.attempt, status.step, status.test_accuracy, status.samples_per_s) == (2, 5, 0.7, None)
    again = [event for event in run_events(2) if event.get("iteration", 0) == 6 and event["event"] == "step"]
    status = known(tmp_path / "b", [start(), *run_events(2), resumed, *again])
    assert (status.step, status.step_loss, status.epoch) == (6, 2 / 6, 2)


def test_a_silent_run(tmp_path: Path) -> None:
    events = [{**event, "time": event["time"] - 1000} for event in [start(), *run_events(2)]]
    status = known(tmp_path, events)
    assert status.silent and status.last_event_s == 1002


def local_run(tmp_path: Path, *, held: bool = True, **changes: Any) -> RunStatus:
    values = {"job": None, "host": socket.gethostname(), "pid": os.getpid(), "time": time.time(), **changes}
    directory = write_run(tmp_path, recipe_plan(), [start(**values)])
    with holding(directory) if held else contextlib.nullcontext():
        status, problem = read_status(find_run(str(directory.path)))
    assert problem is None
    return status


def test_a_run_without_slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert local_run(tmp_path / "mine").state == "running"
    assert local_run(tmp_path / "other", held=False).state == "stopped"
    # This process began after that event, so it cannot be the launcher.
    before = psutil.Process().create_time() - 60
    assert local_run(tmp_path / "another's number", time=before).state == "stopped"
    assert local_run(tmp_path / "elsewhere", host="another").state == "running"
