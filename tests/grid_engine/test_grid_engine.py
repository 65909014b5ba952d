"""Training on a real Grid Engine: submitted, watched, continued in another run of the job, and cancelled."""

from __future__ import annotations

import json
import os
import re
import subprocess
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
from grid_engine.local_grid_engine import local_grid_engine, obstacle

from hpctrain.cli.main import main
from support.launching import AS_ROOT, Launch
from support.refusals import codes

pytestmark = pytest.mark.slow

PROFILE = """\
name: here
source: the tests
scheduler: grid_engine
qsub: ["-pe mpi {ranks}"]
signal_seconds: 5
node: {memory: 4G, exclusive: true}
"""
# It says where it is, and goes on from where it was.
SCRIPT = """\
import os, pathlib, time
import hpctrain as ht

comm = ht.init()
count = pathlib.Path("count")
written = pathlib.Path("count.new")
for number in range(int(count.read_text()) if count.exists() else 0, 1000):
    if comm.rank == 0:
        # Replaced as a whole: the test and the other rank read it at any time.
        written.write_text(str(number + 1))
        written.replace(count)
    time.sleep(0.05)
    if ht.should_stop():
        raise SystemExit(ht.RESUMABLE)
"""


@pytest.fixture(scope="module")
def cell() -> Iterator[dict[str, str]]:
    if reason := obstacle():
        pytest.skip(reason)
    with local_grid_engine() as variables:
        yield variables


@pytest.fixture
def grid_engine(cell: dict[str, str], hpctrain: Launch, tmp_path: Path) -> Launch:
    """``grid_engine("submit", …)``: the fixture ``hpctrain``, with Grid Engine's programs."""
    variables = {name: os.environ[name] for name in ("PYTHONPATH", "OMP_NUM_THREADS") if name in os.environ}
    lines = [f"  {name}: {json.dumps(value)}" for name, value in {**AS_ROOT, **variables}.items()]
    (tmp_path / "here.yaml").write_text("\n".join([f"{PROFILE}environment:", *lines, ""]))
    return partial(hpctrain, **AS_ROOT, **cell)


def _until(condition: Callable[[], bool], log: Path) -> None:
    deadline = time.monotonic() + 200
    while not condition():
        assert time.monotonic() < deadline, log.read_text() if log.exists() else "no log"
        time.sleep(0.3)


def test_trains_on_its_hosts(grid_engine: Launch, cell: dict[str, str], tmp_path: Path) -> None:
    asked = ["submit", "digits", "--cluster", "here.yaml", "--tasks-per-node", "2", "--run-dir", "run"]
    done = grid_engine(*asked, "--time", "0:30:00", "--wait", timeout=400)
    assert done.returncode == 0, done.stdout
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["status"], summary["ranks"]) == ("done", 2)
    assert summary["metrics"]["test_accuracy"] >= 0.975
    assert "2 ranks" in grid_engine("logs", "run").stdout
    # Grid Engine writes a job's end into its accounting a little later.
    _until(
        lambda: (
            [job["state"] for job in json.loads(grid_engine("status", "run", "--json").stdout)["jobs"]] == ["COMPLETED"]
        ),
        tmp_path / "run" / "summary.json",
    )
    (job,) = json.loads((tmp_path / "run" / "submission.json").read_text())["jobs"]
    kept = subprocess.run(["qacct", "-j", job], env={**os.environ, **cell}, capture_output=True, text=True, check=True)
    # Half of a host's 4 GB for each of its two slots.
    assert {"h_rss=2097152K", "whole=true"} <= {*re.findall(r"\w+=\w+", kept.stdout)}


def test_a_job_goes_on_after_its_time(grid_engine: Launch, tmp_path: Path) -> None:
    (tmp_path / "work.py").write_text(SCRIPT)
    asked = ["submit", "work.py", "--cluster", "here.yaml", "--tasks-per-node", "2", "--run-dir", "run"]
    # So that the time's end comes after the ranks have begun, even on a busy machine.
    done = grid_engine(*asked, "--time", "0:00:45")
    assert done.returncode == 0, done.stdout
    (job,) = json.loads((tmp_path / "run" / "submission.json").read_text())["jobs"]
    log = tmp_path / "run" / "logs" / f"job-{job}.log"
    _until(lambda: log.exists() and "(attempt 2)" in log.read_text(), log)
    before = int((tmp_path / "count").read_text())
    _until(lambda: int((tmp_path / "count").read_text()) > before + 5, log)
    status = json.loads(grid_engine("status", "run", "--json").stdout)
    assert (status["state"], [state["id"] for state in status["jobs"]]) == ("running", [job])
    ended = grid_engine("cancel", "run")
    assert ended.returncode == 0 and f"cancelled job {job}" in ended.stdout, ended.stdout
    time.sleep(3)
    count = (tmp_path / "count").read_text()
    time.sleep(3)
    assert (tmp_path / "count").read_text() == count
    status = json.loads(grid_engine("status", "run", "--json").stdout)
    assert status["resume"] == f"qsub {tmp_path / 'run' / 'job.sh'}"
    assert status["state"] == "resumable"


def test_what_cannot_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here.yaml").write_text(PROFILE.replace('qsub: ["-pe mpi {ranks}"]', ""))
    asked = ["submit", "digits", "--cluster", "here.yaml", "--dry-run"]
    for options, code in (
        (["--tasks-per-node", "2"], "HT-profile-lacks-key"),
        (["--qos", "high"], "HT-option-not-usable-here"),
        (["--cpus-per-task", "4"], "HT-option-not-usable-here"),
        (["--run-dir", "a b"], "HT-run-directory-unfit"),
    ):
        assert main([*asked, *options]) == 2
        assert codes(capsys.readouterr().err) == [code]
