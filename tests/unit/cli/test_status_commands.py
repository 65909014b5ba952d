"""``hpctrain status``, ``logs`` and ``cancel``."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from hpctrain.cli.main import main
from hpctrain.common.run.directory import RunDirectory, write_json
from hpctrain.common.run.records import RankRecord, write_record
from support.golden import check_text
from support.refusals import codes
from support.report.written_runs import recipe_plan, run_events, write_run
from support.schedulers.slurm_programs import (
    NO_ACCOUNTING,
    NO_CONTROLLER,
    UNKNOWN_JOB,
    install,
    prints,
    row,
    write_submission,
)


@pytest.fixture
def finished(tmp_path: Path) -> RunDirectory:
    directory = write_run(tmp_path / "run", recipe_plan(), run_events())
    write_json(directory.summary, {"status": "done"})
    return directory


def started(**changes: Any) -> dict[str, Any]:
    return {
        "time": time.time(),
        "event": "start",
        "attempt": 1,
        "iteration": 0,
        "job": None,
        "launcher": "single",
        "hosts": ["n1"],
        "host": socket.gethostname(),
        **changes,
    }


def test_status_as_a_table(finished: RunDirectory, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", str(finished.path)]) == 0
    said, _, ago = capsys.readouterr().out.replace(str(finished.path.parent), "/runs").partition("last event")
    assert ago.split()[-1] == "ago"
    check_text("status-done", said)


def test_misuse(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    install(tmp_path, monkeypatch, squeue=UNKNOWN_JOB, sacct=NO_ACCOUNTING)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").touch()
    for target in ("empty", "file", "nowhere", "n" * 300, "4711"):
        assert main(["status", target]) == 2
        assert codes(capsys.readouterr().err) == ["HT-run-not-found"]
    install(tmp_path, monkeypatch, squeue=NO_CONTROLLER)
    assert main(["status", "4711"]) == 1
    assert codes(capsys.readouterr().err) == ["HT-slurm-command-failed"]
    install(tmp_path, monkeypatch, squeue=prints(row("4711", "RUNNING", "/", nodes="n1")))
    assert main(["status", "4711"]) == 2
    said = capsys.readouterr().err
    assert codes(said) == ["HT-run-not-found"] and "4711, /," in said


def test_logs(finished: RunDirectory, capsys: pytest.CaptureFixture[str]) -> None:
    finished.log(0).write_text("hello\n\x1b[31mI lead\x1b[0m\nbye\n")
    finished.log(1).write_text("hello\nbye\nno end")
    run = str(finished.path)
    for arguments in ([run], [run, "-f"]):
        assert main(["logs", *arguments]) == 0
        printed = [line.split(" ", 1) for line in capsys.readouterr().out.splitlines()]
        epochs = [line for line in printed if line[0] == "epoch"]
        assert len(epochs) == 3
        ranks = [line for line in printed if line[0].startswith("[")]
        assert ranks == [["[0-1]", "hello"], ["[0]", "I lead"], ["[0-1]", "bye"], ["[1]", "no end"]]
    assert main(["logs", run, "--rank", "1"]) == 0
    assert capsys.readouterr().out.splitlines() == ["hello", "bye", "no end"]
    (finished.logs / "job-9.log").write_text("first\n")
    (finished.logs / "job-10.log").write_text("second\n")
    assert main(["logs", run, "--job"]) == 0
    printed = [line.strip("=<> ") for line in capsys.readouterr().out.splitlines()]
    assert printed == ["job-9.log", "first", "job-10.log", "second"]


@pytest.mark.long
def test_logs_follow_until_the_run_ends(tmp_path: Path) -> None:
    launcher = process_in(tmp_path / "run")
    try:
        directory = write_run(tmp_path / "run", recipe_plan(), [started(pid=launcher.pid, time=time.time() + 1)])
        directory.log(0).write_text("first\nhalf-")
        command = [
            sys.executable,
            "-c",
            "import sys; from hpctrain.cli.main import main; sys.exit(main())",
            "logs",
            "-f",
        ]
        with subprocess.Popen([*command, str(directory.path)], stdout=subprocess.PIPE, text=True) as reader:
            assert reader.stdout is not None
            assert reader.stdout.readline() == "[0] first\n"
            with directory.log(0).open("a") as log:
                log.write("line\n")
            assert reader.stdout.readline() == "[0] half-line\n"
            directory.log(1).write_text("second\nlast")
            assert reader.stdout.readline() == "[1] second\n"
            launcher.kill()
            launcher.wait()
            assert reader.stdout.read() == "[1] last\n"
            assert reader.wait(30) == 0
    finally:
        launcher.kill()
        launcher.wait()


def test_logs_misuse(finished: RunDirectory, capsys: pytest.CaptureFixture[str]) -> None:
    run = str(finished.path)
    said = {
        (run, "--rank", "2"): "HT-option-bad-value",
        (run, "--rank", "one"): "--rank one",
        (run, "--rank", ""): "empty range",
        (run, "--rank", "1", "--job"): "leave out one of them",
    }
    for arguments, words in said.items():
        assert main(["logs", *arguments]) == 2
        assert words in capsys.readouterr().err
    assert main(["logs", run, "--rank", "1"]) == 0
    check_text("logs-nothing-printed", capsys.readouterr().err.replace(str(finished.path.parent), "/runs"))


def test_cancel_nothing(finished: RunDirectory, capsys: pytest.CaptureFixture[str]) -> None:
    for _ in range(2):
        assert main(["cancel", str(finished.path)]) == 0
        check_text("cancel-nothing", capsys.readouterr().out)


def process_in(folder: Path) -> subprocess.Popen[bytes]:
    """A process that holds a run's directory open, as those of a run do."""
    folder.mkdir(exist_ok=True)
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        return subprocess.Popen(["sleep", "60"], stdin=descriptor)
    finally:
        os.close(descriptor)


def test_cancel_ends_a_local_launcher(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    launcher = process_in(tmp_path / "run")
    try:
        directory = write_run(tmp_path / "run", recipe_plan(), [started(pid=launcher.pid, time=time.time() + 1)])
        assert main(["cancel", str(directory.path)]) == 0
        out = capsys.readouterr().out
        out = out.replace(str(launcher.pid), "PID").replace(str(tmp_path), "/runs")
        check_text("cancel-local", out)
        assert launcher.wait(5) is not None
        assert main(["cancel", str(directory.path)]) == 0
        assert str(launcher.pid) not in capsys.readouterr().out
    finally:
        launcher.kill()
        launcher.wait()


def test_other_jobs_in_a_run_directory_are_not_the_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = write_run(tmp_path / "run", recipe_plan(), None)
    write_submission(directory, "12")
    (tmp_path / "link").symlink_to(directory.path)

    def queue(state: str) -> str:
        own = [row("12", state, directory.path, nodes="n1"), row("15", state, tmp_path / "link", nodes="n2")]
        others = [("13", "(null)"), ("14", f"{directory.path}/evaluate.sh"), ("16", "/bin/bash")]
        rows = [row(job, "RUNNING", directory.path, command=command, nodes="n3") for job, command in others]
        return prints("".join([*own, *rows]))

    squeue = f"[ -e {tmp_path}/ended ] && {queue('CANCELLED')} || {queue('RUNNING')}"
    calls = install(tmp_path, monkeypatch, squeue=squeue, scancel=f"touch {tmp_path}/ended")
    assert main(["cancel", "12"]) == 0
    assert ["scancel", "12", "15"] in [line.split() for line in calls.read_text().splitlines()]
    check_text("cancel-jobs", capsys.readouterr().out.replace(str(tmp_path), "/runs"))


def test_the_jobs_of_a_run_are_not_those_of_its_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = write_run(tmp_path / "run", recipe_plan(), [started(pid=None, host=None, job="12"), *run_events(1)])
    write_submission(directory, "12")
    directory.script.write_text("#!/bin/sh\n")
    copy = tmp_path / "copy"
    shutil.copytree(directory.path, copy)
    calls = install(
        tmp_path, monkeypatch, squeue=prints(row("12", "RUNNING", directory.path, nodes="n1")), scancel="exit 1"
    )
    main(["cancel", str(copy)])
    assert "scancel" not in calls.read_text()
    for place, state in ((copy, "stopped"), (directory.path, "running")):
        capsys.readouterr()
        assert main(["status", str(place), "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["state"] == state
    directory.path.rename(tmp_path / "moved")
    assert main(["status", str(tmp_path / "moved"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["state"] == "running"


@pytest.mark.parametrize("job", ["x" * 10**5, "/../../outside", "../../outside"])
def test_a_job_that_is_no_number_names_no_file(
    job: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    install(tmp_path, monkeypatch, squeue="exit 0")
    directory = write_run(tmp_path / "runs" / "run", recipe_plan(), [started(pid=None, host=None, job=job)])
    (directory.logs / "job-").mkdir(parents=True)
    (tmp_path / "outside.log").write_text("secret\n")
    (tmp_path / "runs" / "outside.log").write_text("secret\n")
    assert main(["status", str(directory.path)]) == 0
    assert "secret" not in capsys.readouterr().out
    write_submission(directory, "12")
    directory.submission.write_text(directory.submission.read_text().replace('"12"', json.dumps(job)))
    assert main(["status", str(directory.path)]) == 2


def leave_when_asked(directory: RunDirectory) -> None:
    """As a launcher does whose ranks are asked to stop."""
    deadline = time.monotonic() + 100
    while not directory.stop.exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    time.sleep(0.2)
    directory.summary.write_text('{"status": "resumable"}')


def test_ranks_of_a_job_save_their_state_before_it_is_cancelled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = write_run(tmp_path / "run", recipe_plan(), None)
    write_submission(directory, "12")
    record = RankRecord(rank=0, host="n1", pid=1, started=1.0, status="running", listens=True)
    write_record(directory, record)
    jobs = [prints(row("12", state, directory.path, nodes="n1")) for state in ("CANCELLED", "RUNNING")]
    squeue = f"[ -e {tmp_path}/ended ] && {jobs[0]} || {jobs[1]}"
    # As a launcher does once its ranks have left.
    calls = install(
        tmp_path,
        monkeypatch,
        squeue=squeue,
        scancel=f"[ -e {directory.summary} ] && echo saved >> {tmp_path}/saved; touch {tmp_path}/ended",
    )

    ranks = threading.Thread(target=leave_when_asked, args=[directory])
    ranks.start()
    try:
        assert main(["cancel", str(directory.path)]) == 0
    finally:
        ranks.join()
    assert "scancel 12\n" in calls.read_text()
    assert (tmp_path / "saved").exists()
    # By which its script knows that it is not to come back.
    assert directory.stop.read_text() == "cancelled\n"


def _record(directory: RunDirectory, rank: int, status: str, *, host: str | None = None, pid: int = 2**22 + 1) -> None:
    host = host or socket.gethostname()
    write_record(directory, RankRecord(rank=rank, host=host, pid=pid, started=time.time(), status=status))


@pytest.mark.parametrize("leaves", [True, False])
def test_cancel_stops_ranks_of_a_launcher_on_another_host(
    leaves: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = recipe_plan(stop={"seconds": 20.0 if leaves else 0.5})
    directory = write_run(tmp_path / "my run", plan, [started(pid=77, host="gpu9")])
    write_record(directory, RankRecord(rank=0, host="gpu9", pid=1, started=1.0, status="running", listens=True))
    launcher = threading.Thread(target=leave_when_asked, args=[directory])
    if leaves:
        launcher.start()
    try:
        code = main(["cancel", str(directory.path)])
    finally:
        if leaves:
            launcher.join()
    said = capsys.readouterr()
    assert code == (0 if leaves else 1)
    assert directory.stop.read_text() == "cancelled\n"
    assert ("resumable" in said.out) == leaves
    assert [("gpu9" in said.err), (f"'{directory.path}'" in said.err), ("kill 77" in said.err)] == [not leaves] * 3
