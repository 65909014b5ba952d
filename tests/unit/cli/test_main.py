"""The command itself: quick, and free of what only ranks need."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

from hpctrain.cli.main import main
from hpctrain.commit import of_checkout

ROOT = Path(__file__).parents[3]
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
LOGIN_HALF = ["cli", "report", "control", "common"]


def loaded(modules: list[str]) -> tuple[int, str]:
    program = LOADED.format(modules=modules)
    result = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    count, names = result.stdout.split(maxsplit=1)
    return int(count), names.strip()


def test_import_hpctrain_loads_no_framework() -> None:
    assert loaded([]) == (1, "[]")


@pytest.mark.slow
def test_the_login_half_loads_no_framework() -> None:
    count, names = loaded(LOGIN_HALF)
    assert names == "[]"
    assert count > 200


def test_help_loads_only_what_it_shows(capsys: pytest.CaptureFixture[str]) -> None:
    """Its time is a matter of what is imported; the slow ones are not."""
    program = (
        "import sys; from hpctrain.cli.main import main; code = main(['--help']); "
        "slow = {'pydantic', 'numpy', 'yaml', 'psutil', 'matplotlib', 'rich'}; "
        "print(code, sorted(slow & set(sys.modules)), file=sys.stderr)"
    )
    result = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    assert result.stderr == "0 []\n"
    for command in ("run", "recipes", "topology", "report", "bench", "horovod"):
        assert f" {command} " in result.stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["rnu", "digits"], 2),
        (["plan", "digits", "-np", "2"], 0),
        (["run", "digits", "-np", "1", "--dry-run"], 0),
        (["submit", "digits", "--cluster", "cpu", "--dry-run"], 0),
    ],
)
def test_answers_load_no_numpy_and_no_rich(arguments: list[str], code: int, tmp_path: Path) -> None:
    program = (
        "import json, sys; from hpctrain.cli.main import main; code = main(json.loads(sys.argv[1])); "
        "slow = {'numpy', 'rich.console', 'matplotlib', 'tensorboard'}; "
        "print(code, sorted(slow & set(sys.modules)), file=sys.stderr)"
    )
    command = [sys.executable, "-c", program, json.dumps(arguments)]
    result = subprocess.run(command, check=True, capture_output=True, text=True, cwd=tmp_path)
    assert result.stderr.splitlines()[-1] == f"{code} []"


def test_a_command_that_is_no_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["rnu", "digits"]) == 2
    said = capsys.readouterr().err
    assert "'rnu'" in said and "'run'" in said


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    commit = of_checkout(ROOT)
    known = f"commit {commit}" if commit else "no commit known"
    assert capsys.readouterr().out == f"{metadata.version('hpctrain')} ({known})\n"
