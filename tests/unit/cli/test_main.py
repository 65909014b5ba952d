"""The command itself: quick, and free of what only ranks need."""

from __future__ import annotations

import subprocess
import sys
from importlib import metadata

import pytest

from hpctrain.cli.main import main

LOADED = """
import importlib, pkgutil, sys
import hpctrain
names = ["hpctrain"]
for half in {modules}:
    module = importlib.import_module("hpctrain." + half)
    for found in pkgutil.walk_packages(getattr(module, "__path__", []), module.__name__ + "."):
        names.append(found.name)
        importlib.import_module(found.name)
print(len(names), sorted({{"torch", "tensorflow", "keras", "mpi4py", "horovod"}} & set(sys.modules)))
"""
LOGIN_HALF = [
    "cli",
    "report",
    "launch",
    "horovod",
    "planning",
    "plan",
    "topology",
    "recipes",
    "cluster",
    "events",
    "rundir",
    "errors",
]


def loaded(modules: list[str]) -> tuple[int, str]:
    program = LOADED.format(modules=modules)
    result = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    count, names = result.stdout.split(maxsplit=1)
    return int(count), names.strip()


def test_import_hpctrain_loads_no_framework() -> None:
    assert loaded([]) == (1, "[]")


def test_the_login_half_loads_no_framework() -> None:
    count, names = loaded(LOGIN_HALF)
    assert names == "[]"
    assert count > 20


def test_help_loads_only_what_it_shows(capsys: pytest.CaptureFixture[str]) -> None:
    """Its time is a matter of what is imported; the slow ones are not."""
    program = (
        "import sys; from hpctrain.cli.main import main; code = main(['--help']); "
        "print(code, sorted({'pydantic', 'numpy', 'yaml', 'psutil', 'matplotlib'} & set(sys.modules)), file=sys.stderr)"
    )
    result = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    assert result.stderr == "0 []\n"
    for command in ("run", "recipes", "topology", "report", "bench", "horovod"):
        assert f" {command} " in result.stdout


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"{metadata.version('hpctrain')}\n"


@pytest.mark.parametrize("command", ["run", "plan", "recipes", "topology", "report", "bench", "horovod"])
def test_only_the_whole_command_installs_completion(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command, "--help"]) == 0
    assert "completion" not in capsys.readouterr().out
