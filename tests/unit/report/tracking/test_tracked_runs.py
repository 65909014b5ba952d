"""Runs with trackers, from the command line."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from hpctrain.cli.main import main
from hpctrain.common.extras import require_trackers
from hpctrain.common.run.directory import RunDirectory, read_model
from hpctrain.common.run.plan import Plan
from support.refusals import codes

SCRIPT = "import hpctrain as ht\nht.init()\nht.log(loss=0.5, step=1)\n"


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    Path("train.py").write_text(SCRIPT)


def run(*options: str) -> int:
    return main(["run", "train.py", "--backend", "single", "-np", "1", "--run-dir", "run", *options])


def test_tensorboard_is_one_of_them(capsys: pytest.CaptureFixture[str]) -> None:
    """And can be left out, taken up, and written later."""
    directory = RunDirectory(Path("run"))
    assert run("--tracking", "none") == 0
    assert not directory.tensorboard.exists()
    assert read_model(directory.plan, Plan).trackers == ()
    assert main(["report", "run", "--tracking", "tensorboard"]) == 0
    assert list(directory.tensorboard.iterdir())
    assert not directory.report.exists()


@pytest.mark.parametrize("package", ["mlflow", "wandb"])
@pytest.mark.parametrize(
    "command",
    [["submit", "train.py", "--cluster", "cpu", "--run-dir", "run"], ["report", "."]],
    ids=["submit", "report"],
)
def test_a_missing_package_is_named(
    package: str, command: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    assert main([*command, "--tracking", package]) == 2
    error = capsys.readouterr().err
    assert codes(error) == ["HT-package-not-installed"]
    assert f"'hpctrain[{package}]'" in error
    assert not Path("run").exists()


def test_a_server_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("hpctrain.common.extras.require", lambda *names: None)
    assert run("--tracking", "mlflow") == 2
    assert "export MLFLOW_TRACKING_URI=http://HOST:PORT" in capsys.readouterr().err
    assert not Path("run").exists()
    require_trackers(("mlflow",), {"MLFLOW_TRACKING_URI": "http://host:5000"})


@pytest.mark.parametrize("command", [["run", "train.py"], ["report", "."]])
def test_an_unknown_tracker(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*command, "--tracking", "mlfow"]) == 2
    error = capsys.readouterr().err
    assert "'mlflow'?" in error and "tensorboard" in error


@pytest.mark.long
def test_a_job_goes_on_where_its_tracker_gets_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    """What its program says is told, and how the curves get there later."""
    recipe_run = Path("train.py").resolve()
    Path("train.py").write_text(f"import sys\n{SCRIPT}sys.exit(4)\n")
    assert run("--tracking", "none") == 1
    plan = read_model(RunDirectory(Path("run")).plan, Plan)
    assert plan.script is not None and plan.script.path == recipe_run
    tracked = plan.model_copy(update={"script": plan.script.model_copy(update={"tracking": ("mlflow",)})})
    RunDirectory(Path("run")).plan.write_text(tracked.model_dump_json())
    Path("train.py").write_text(SCRIPT)
    assert main(["run", "--resume", "--run-dir", "run", "--accept-changes"]) == 0
    error = capfd.readouterr().err
    command = "hpctrain report run --tracking mlflow"
    assert "mlflow: it gets no more of this run (tracking:" in error and command in error


def test_a_folder_that_is_no_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", ".", "--tracking", "tensorboard"]) == 2
    assert codes(capsys.readouterr().err) == ["HT-run-no-events"]
