"""Runs with trackers, from the command line."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from hpctrain.cli.main import main
from hpctrain.common.extras import require_trackers
from support.refusals import codes

SCRIPT = "import hpctrain as ht\nht.init()\nht.log(loss=0.5, step=1)\n"


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    Path("train.py").write_text(SCRIPT)


def run(*options: str) -> int:
    return main(["run", "train.py", "--backend", "single", "-np", "1", "--run-dir", "run", *options])


@pytest.mark.parametrize("package", ["mlflow", "wandb"])
def test_a_missing_package_is_named(
    package: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    assert main(["submit", "train.py", "--cluster", "cpu", "--run-dir", "run", "--tracking", package]) == 2
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
