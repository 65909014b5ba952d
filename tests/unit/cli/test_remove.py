"""``hpctrain remove``."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hpctrain.cli.main import main
from hpctrain.common.run.directory import RunDirectory
from support.refusals import codes
from support.report.written_runs import recipe_plan, run_events, script_plan, write_run
from support.schedulers.slurm_programs import install, write_submission


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(name: str, *, ended: bool = True) -> RunDirectory:
    started = {"event": "start", "time": 1.7e9, "attempt": 1, "iteration": 0, "pid": os.getpid(), "host": "elsewhere"}
    return write_run(Path("hpctrain-runs") / name, recipe_plan(), run_events() if ended else [started])


def test_an_ended_run_goes_and_a_dry_run_removes_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    one, other, elsewhere = run("a b"), run("other"), Path("elsewhere")
    elsewhere.mkdir()
    (elsewhere / "kept").touch()
    one.checkpoints.symlink_to(elsewhere.absolute())
    for options, there in ((["--dry-run"], True), ([], False)):
        assert main(["remove", str(one.path), *options]) == 0
        assert "a b'" in capsys.readouterr().out and one.path.exists() == there
    assert other.plan.exists() and (elsewhere / "kept").exists()


def test_old_runs_go(capsys: pytest.CaptureFixture[str]) -> None:
    old, alive = run("old"), run("alive", ended=False)
    assert main(["remove", "--older-than", "1"]) == 0
    said = capsys.readouterr()
    assert said.out == "removed hpctrain-runs/old\n" and "kept" in said.err and str(alive.path) in said.err
    assert [path.name for path in old.path.parent.iterdir()] == ["alive"]


def test_what_is_no_ended_run_stays(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    ended = str(run("ended").path)

    def refused(path: Path, code: str) -> None:
        before = sorted(Path().rglob("*"))
        assert main(["remove", ended, str(path)]) == 2
        assert codes(capsys.readouterr().err) == [code] and set(before) <= set(Path().rglob("*"))

    Path("empty").mkdir()
    refused(Path("empty"), "HT-run-not-found")
    refused(run("study/one").path.parent, "HT-run-not-found")  # other things may be in it
    refused(run("alive", ended=False).path, "HT-remove-alive")
    damaged = run("damaged")
    damaged.plan.write_text("{")
    refused(damaged.path, "HT-remove-alive")
    project = write_run(Path("project"), script_plan("project/train.py"), run_events())
    (project.path / "train.py").touch()
    refused(project.path, "HT-remove-not-a-run-alone")
    Path("link").symlink_to("hpctrain-runs/ended")
    refused(Path("link"), "HT-remove-not-a-run-alone")
    submitted = write_run(Path("hpctrain-runs/submitted"), recipe_plan(), None)
    write_submission(submitted, "12")
    install(Path().absolute(), monkeypatch, squeue="exit 1")
    refused(submitted.path, "HT-remove-alive")
    here = run("here")
    monkeypatch.chdir(here.path)
    assert main(["remove", "."]) == 2
    assert codes(capsys.readouterr().err) == ["HT-remove-not-a-run-alone"]


@pytest.mark.parametrize("options", [[], ["hpctrain-runs/one", "--older-than", "1"]])
def test_either_runs_or_their_age(options: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["remove", *options]) == 2
    assert codes(capsys.readouterr().err) == ["HT-argument-missing"]
