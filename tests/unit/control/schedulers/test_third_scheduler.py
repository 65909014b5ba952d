"""A scheduler that a package of its own adds: it passes submit, status, logs and cancel."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Collection, Iterator, Sequence
from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path

import psutil
import pytest

from hpctrain.cli.main import main
from hpctrain.common.run.directory import RunDirectory
from hpctrain.control.schedulers import scheduler as registry
from hpctrain.control.schedulers.jobs import JobState
from hpctrain.control.schedulers.scheduler import Order, Say, Scheduler, Submitted
from hpctrain.control.schedulers.submission import made_run, record
from support.refusals import codes

PROFILE = "name: mine\nsource: the tests\nscheduler: background\n"


class Background(Scheduler):
    """A job is a process of this machine, by its number."""

    def describe(self, order: Order, say: Say) -> str:
        return f"hpctrain run, {order.request.ranks} ranks\n"

    def submit(self, order: Order, say: Say) -> Submitted:
        with made_run(order, order.plan(), {}) as directory:
            command = [sys.executable, "-m", "hpctrain", "run", "--resume", "--run-dir", str(directory.path)]
            with (directory.logs / "job.log").open("wb") as log:
                job = str(subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True).pid)
            record(directory, order, [job])
        return Submitted(directory=directory.path, jobs=(job,), advice=f"in the background as {job}")

    def list(self, jobs: Collection[str] | None, *, user: int, seconds: float) -> Sequence[JobState]:
        known = [process for process in map(_process, jobs or ()) if process]
        folder = Path.cwd() / "run"
        return [JobState(id=str(p.pid), state="RUNNING", nodes="here", directory=folder) for p in known]

    def cancel(self, jobs: Sequence[str]) -> None:
        for job in jobs:
            os.kill(int(job), signal.SIGTERM)

    def logs(self, directory: RunDirectory, jobs: Sequence[str]) -> Sequence[Path]:
        return [directory.logs / "job.log"]


def _process(job: str) -> psutil.Process | None:
    try:
        process = psutil.Process(int(job))
        return process if process.status() != psutil.STATUS_ZOMBIE else None
    except psutil.NoSuchProcess:
        return None


@pytest.fixture(autouse=True)
def _installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    entry = EntryPoint("background", f"{__name__}:Background", "hpctrain.schedulers")
    load = EntryPoint.load
    monkeypatch.setattr(EntryPoint, "load", lambda entry: Background if entry.name == "background" else load(entry))
    monkeypatch.setattr(registry, "entry_points", lambda **_: EntryPoints([entry]))
    monkeypatch.chdir(tmp_path)
    Path("mine.yaml").write_text(PROFILE)
    registry.scheduler.cache_clear()
    yield
    registry.scheduler.cache_clear()


@pytest.mark.slow
def test_it_passes_submit_status_logs_and_cancel(capsys: pytest.CaptureFixture[str]) -> None:
    Path("work.py").write_text("import time\nprint('it runs', flush=True)\ntime.sleep(100)\n")
    asked = ["submit", "work.py", "--cluster", "mine.yaml", "--run-dir", "run"]
    assert main([*asked, "--dry-run"]) == 0
    assert capsys.readouterr().out == "hpctrain run, 1 ranks\n"
    assert main(asked) == 0
    directory, job = capsys.readouterr().out.split()
    assert json.loads(Path(directory, "submission.json").read_text())["scheduler"] == "background"
    deadline = time.monotonic() + 100
    while main(["logs", "run"]) or "it runs" not in capsys.readouterr().out:
        assert time.monotonic() < deadline, Path(directory, "logs", "job.log").read_text()
        time.sleep(0.2)
    assert main(["status", "run", "--json"]) == 0
    status = json.loads(capsys.readouterr().out)
    assert (status["state"], status["jobs"][0]["id"]) == ("running", job)
    assert main(["cancel", "run"]) == 0
    assert f"cancelled job {job}, which was RUNNING on here" in capsys.readouterr().out
    assert main(["status", "run", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["jobs"] == []


def test_one_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    Path("work.py").touch()
    Path("mine.yaml").write_text(PROFILE.replace("background", "backgruond"))
    assert main(["submit", "work.py", "--cluster", "mine.yaml"]) == 2
    said = capsys.readouterr().err
    assert codes(said) == ["HT-choice-unknown"] and "background" in said
