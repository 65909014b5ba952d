from __future__ import annotations

import json
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from hpctrain.cli.main import main
from hpctrain.cli.report import report
from hpctrain.common.run.directory import RunDirectory, write_json
from hpctrain.report.summary import summarise
from support.report.predicted_plans import figure, record, row, written
from support.report.written_runs import recipe_plan


def _invoke(*arguments: str) -> str:
    app = typer.Typer()
    app.command()(report)
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    return result.stdout


def test_prints_the_page_s_path(finished: RunDirectory) -> None:
    assert _invoke(str(finished.path)) == f"{finished.report}\n"
    assert finished.report.read_text().startswith("<!doctype html>")


def test_json_is_the_summary(finished: RunDirectory) -> None:
    assert json.loads(_invoke(str(finished.path), "--json")) == summarise(finished, recipe_plan(), "done")
    assert not finished.report.exists()


@pytest.mark.long
def test_a_prediction_becomes_the_run_s_own(
    finished: RunDirectory, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    left = {**summarise(finished, recipe_plan(), "done"), "failure": {"rank": 1}}
    write_json(finished.summary, left)
    content = record(row(gpus=16, nodes=8), row(step_s=figure(0.1, 0.2, 0.3)))
    file = written(tmp_path / "plan.json", content)
    assert main(["report", str(finished.path), "--prediction", str(file)]) == 0
    said = capsys.readouterr()
    assert said.out == f"{finished.report}\n"
    assert "500 ms" in said.err and "slower" in said.err
    assert json.loads(finished.prediction.read_text()) == content
    summary = json.loads(finished.summary.read_text())
    assert summary["outside"][0] == "step_s" and summary["failure"] == {"rank": 1}
    assert {**summary, "predicted": None, "outside": None} == left
    # From now on without the option.
    assert main(["report", str(finished.path)]) == 0
    assert "500 ms" in capsys.readouterr().err
    assert main(["report", str(finished.path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == summary


def test_a_foreign_prediction_changes_nothing(
    finished: RunDirectory, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = sorted(finished.path.rglob("*"))
    for content in (record(recipe="goyal2017"), "{"):
        file = written(tmp_path / "plan.json", content)
        assert main(["report", str(finished.path), "--prediction", str(file)]) == 2
        said = capsys.readouterr().err
        assert str(file) in said and "hpctrain predict" in said
    assert sorted(finished.path.rglob("*")) == before
