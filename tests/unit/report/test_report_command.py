from __future__ import annotations

import json

import typer
from typer.testing import CliRunner

from hpctrain.cli.report import report
from hpctrain.common.run.directory import RunDirectory
from hpctrain.report.summary import summarise
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
