"""The list of runs."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from hpctrain.cli.main import main
from hpctrain.common.run.directory import RunDirectory, write_json
from hpctrain.report.runs import list_runs
from support.report.written_runs import recipe_plan, run_events, script_plan, write_run
from support.schedulers.slurm_programs import install, prints, row, write_submission


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two that began at one time, one of them further, and a script's that never began."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    done = write_run(Path("runs/done"), recipe_plan(), run_events())
    write_json(done.summary, {"status": "done"})
    write_run(Path("runs/half"), recipe_plan(), run_events(epochs=2))
    plan = write_run(Path("runs/script[red]"), script_plan(), None).plan
    os.utime(plan, (1_600_000_000, 1_600_000_000))
    return tmp_path / "runs"


def test_newest_first(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status"]) == 0
    lines = [line.split("  ") for line in capsys.readouterr().out.splitlines() if line.strip()]
    cells = [[cell.strip() for cell in line if cell.strip()] for line in lines if "──" not in line[0]]
    assert cells[0] == ["run", "of", "state", "step", "when"]
    assert [line[:3] for line in cells[1:]] == [
        ["done", "digits", "done"],
        ["half", "digits", "stopped"],
        ["script[red]", "train.py", "not started"],
    ]
    assert [re.findall("[0-9]+", line[3]) for line in cells[1:3]] == [["12", "12"], ["8", "12"]]
    assert cells[3][3].startswith("2020-09-13")


def test_json(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["runs"]
    assert [(each["name"], each["state"], each["step"]) for each in found] == [
        ("done", "done", 12),
        ("half", "stopped", 8),
        ("script[red]", "not started", None),
    ]
    assert found[0]["run_dir"] == str(runs / "done")


def test_a_damaged_run_hides_no_other(runs: Path) -> None:
    (runs / "half" / "plan.json").write_text("{")
    found, _ = list_runs(runs)
    assert {each.name: each.state for each in found}["half"] == "damaged"
    assert len(found) == 3


def test_slurm_is_asked_once_and_only_where_there_was_a_job(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    array = RunDirectory(runs / "array")
    for task in (1, 2):
        write_run(array.path / f"task-{task}", recipe_plan(), None)
    queue = row("12_2", "RUNNING", array.path, number="14", nodes="n1")
    calls = install(runs.parent, monkeypatch, squeue=prints(queue))
    assert list_runs(runs)[1] is None
    assert calls.read_text() == ""
    write_submission(array, "12")
    states = {each.name: each.state for each in list_runs(runs)[0]}
    assert (states["array/task-1"], states["array/task-2"]) == ("not started", "running")
    assert len(calls.read_text().splitlines()) == 1


def test_no_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["status"]) == 0
    assert str(tmp_path / "runs") in capsys.readouterr().err
    assert main(["status", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"runs": []}


def test_python_m_hpctrain() -> None:
    command = [sys.executable, "-m", "hpctrain", "run", "digit"]
    result = subprocess.run(command, check=False, capture_output=True, text=True)
    assert result.returncode == 2
    assert result.stderr.count("'digit'") == 1
