"""The list of runs."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.cli.main import main
from hpctrain.common.run.directory import RUNS, write_json
from hpctrain.control.schedulers.run_jobs import last_run
from hpctrain.report.status import RunStatus, list_runs, runs_text
from support.refusals import refused
from support.report.written_runs import digits, recipe_plan, run_events, script_plan, write_run
from support.schedulers.slurm_programs import install, prints, row, write_submission


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two that began at one time, one of them further, and a script's that never began."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    done = write_run(Path("hpctrain-runs/done"), recipe_plan(), run_events())
    write_json(done.summary, {"status": "done"})
    write_run(Path("hpctrain-runs/half"), recipe_plan(), run_events(epochs=2))
    plan = write_run(Path("hpctrain-runs/script[red]"), script_plan(), None).plan
    os.utime(plan, (1_600_000_000, 1_600_000_000))
    return tmp_path / RUNS


def test_a_line_each_with_the_newest_last(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [shlex.split(line)[0] for line in lines] == [
        "hpctrain-runs/script[red]",
        "hpctrain-runs/half",
        "hpctrain-runs/done",
    ]
    cells = [re.split(" {2,}", line)[1:4] for line in lines]
    assert [each[0] for each in cells] == ["not started", "stopped", "done"]
    assert [re.findall("[0-9]+", each[1]) for each in cells[1:]] == [["8", "12"], ["12", "12"]]
    assert cells[0][1].startswith("2020-09-13")


@given(
    st.lists(
        st.tuples(st.text("ab c'", min_size=1, max_size=90), st.text(max_size=90), st.none() | st.integers(0, 10**9))
    ),
    st.none() | st.integers(1, 200),
)
def test_a_run_takes_one_line_and_its_path_is_whole(
    found: list[tuple[str, str, int | None]], width: int | None
) -> None:
    rows = [
        RunStatus(run_dir=f"/r/{name}", title="", state="done", message=said, step=step, updated=1.0)
        for name, said, step in found
    ]
    lines = runs_text(rows, RUNS, width).split("\n") if rows else []
    assert len(lines) == len(rows)
    for line, each in zip(reversed(lines), rows, strict=True):
        path = shlex.quote(f"hpctrain-runs/{Path(each.run_dir).name}")
        assert line.startswith(path)
        assert width is None or len(line) <= max(width, len(path) + 1)


def test_the_last_run_needs_no_name(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    newest = runs / "half"
    os.utime(newest / "events.jsonl", (2_000_000_000, 2_000_000_000))
    for arguments in (
        *(["status", "last"], ["logs"], ["logs", "last"], ["report"], ["report", "last"], ["cancel"]),
        ["checkpoint", "list", "last"],
    ):
        assert main(arguments) == 0, arguments
        capsys.readouterr()
    assert (newest / "report.html").exists() and not (runs / "done" / "report.html").exists()
    assert last_run() == Path("hpctrain-runs/half")
    os.utime(runs / "done" / "events.jsonl", (2_100_000_000, 2_100_000_000))
    assert main(["run", "--resume", "--run-dir", "last", "--dry-run"]) == 0
    assert "hpctrain-runs/done" in capsys.readouterr().out
    assert main(["run", "--resume", "--run-dir", "./last", "--dry-run"]) == 2
    assert main(["report", "./last"]) == 2
    shutil.copytree(runs / "half", "last")
    assert main(["report", "./last"]) == 0
    assert Path("last/report.html").exists() and not (runs / "done" / "report.html").exists()
    shutil.rmtree(runs / "done")
    assert last_run() == Path("hpctrain-runs/half")


def test_where_there_is_no_run_there_is_no_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with refused("HT-run-not-found", path=tmp_path / RUNS):
        last_run()
    assert main(["report"]) == 2


def test_a_line_says_what_was_measured_and_what_differs(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(
        runs / "other", recipe_plan(ranks=4, recipe=digits().model_copy(update={"seed": 8})), run_events(epochs=2)
    )
    assert main(["status"]) == 0
    line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("hpctrain-runs/done "))
    assert re.search(r"accuracy 0\.9 .* s  .*seed=", line)
    assert main(["status", "--json"]) == 0
    newest = json.loads(capsys.readouterr().out)["runs"][0]
    assert newest["test_accuracy"] == 0.9 and newest["elapsed_s"] > 0
    assert newest["differs"] == {"seed": digits().seed, "ranks": 2}


def test_json(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["runs"]
    assert [(Path(each["run_dir"]).name, each["state"], each["step"]) for each in found] == [
        ("done", "done", 12),
        ("half", "stopped", 8),
        ("script[red]", "not started", None),
    ]
    assert found[0]["run_dir"] == str(runs / "done")


def test_a_damaged_run_hides_no_other(runs: Path) -> None:
    (runs / "half" / "plan.json").write_text("{")
    found, _ = list_runs(runs)
    assert {Path(each.run_dir).name: each.state for each in found}["half"] == "damaged"
    assert len(found) == 3


def test_slurm_is_asked_once_and_only_where_there_was_a_job(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    waiting, running = (write_run(runs / f"job-{number}", recipe_plan(), None) for number in (1, 2))
    calls = install(runs.parent, monkeypatch, squeue=prints(row("14", "RUNNING", running.path, nodes="n1")))
    assert list_runs(runs)[1] is None
    assert calls.read_text() == ""
    write_submission(waiting, "13")
    write_submission(running, "14")
    states = {Path(each.run_dir).name: each.state for each in list_runs(runs)[0]}
    assert (states["job-1"], states["job-2"]) == ("stopped", "running")
    assert len(calls.read_text().splitlines()) == 1
