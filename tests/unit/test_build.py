"""`python -m build` makes a wheel that works in an environment of its own with nothing but the base dependencies."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import venv
import zipfile
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import pytest

import hpctrain
from hpctrain.commit import of_checkout
from hpctrain.common.recipes.entries import recipe_names
from support.requirements_of_project import PROJECT, ROOT, closure


@dataclass(frozen=True, kw_only=True)
class Built:
    """What was built, and the Python of an environment into which pip installed the wheel."""

    wheel: Path
    sdist: Path
    python: Path

    def hpctrain(self, *arguments: str) -> str:
        """What the installed command prints."""
        return run(str(self.python.with_name("hpctrain")), *arguments, cwd=self.python.parents[1])


def run(*command: str, cwd: Path) -> str:
    # No PYTHONPATH: what is started finds the packages of its own environment.
    env = {"PATH": os.environ["PATH"]}
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    folder = tmp_path_factory.mktemp("build")
    # The source package first, and the wheel from that: without a checkout, as sites build it.
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder / "dist"), str(ROOT), cwd=folder)
    (wheel,) = (folder / "dist").glob("*.whl")
    (sdist,) = (folder / "dist").glob("*.tar.gz")
    python = folder / "environment" / "bin" / "python"
    venv.create(folder / "environment", symlinks=True)
    link_base_dependencies(next((folder / "environment").glob("lib/python*/site-packages")))
    # Without an index pip installs only if all that the wheel asks for is there.
    run(sys.executable, "-m", "pip", "--python", str(python), "install", "--no-index", str(wheel), cwd=folder)
    return Built(wheel=wheel, sdist=sdist, python=python)


def link_base_dependencies(packages: Path) -> None:
    """Put what the base dependencies are into another environment, as links to the files of this one."""
    for name in closure(PROJECT["dependencies"]):
        files = metadata.files(name) or []
        for top in {file.parts[0] for file in files} - {"..", "__pycache__"}:
            (packages / top).symlink_to(Path(str(metadata.distribution(name).locate_file(top))))


@pytest.mark.long
def test_the_installed_command_tells_version_and_commit(built: Built) -> None:
    commit = of_checkout(ROOT)
    known = f"commit {commit}" if commit else "no commit known"
    assert built.hpctrain("--version") == f"{hpctrain.__version__} ({known})\n"


@pytest.mark.slow
def test_the_installed_command_has_the_recipes(built: Built) -> None:
    listed = built.hpctrain("recipes", "list")
    assert [name for name in recipe_names() if name not in listed] == []


@pytest.mark.long
def test_the_installed_command_renders_a_job(built: Built) -> None:
    script = built.hpctrain("submit", "digits", "--cluster", "dgx-h100", "--nodes", "2", "--dry-run")
    assert "#SBATCH --nodes=2" in script


def test_the_wheel_holds_all_that_is_no_python(built: Built) -> None:
    """Each file of the package and each template is in it; a file that the build forgets is missed first by a user."""
    with zipfile.ZipFile(built.wheel) as archive:
        held = set(archive.namelist())
    package = {path.relative_to(ROOT) for path in (ROOT / "hpctrain").rglob("*.*")}
    templates = {Path("hpctrain", path.relative_to(ROOT)) for path in (ROOT / "slurm").rglob("*.*")}
    wanted = {str(path) for path in package | templates if "__pycache__" not in path.parts}
    assert len(wanted) > 300
    assert sorted(wanted - held) == []


def test_the_source_package_can_be_tested(built: Built) -> None:
    with tarfile.open(built.sdist) as archive:
        held = {name.partition("/")[2] for name in archive.getnames()}
    assert {"pyproject.toml", ".ci/build_hook.py", "tests/conftest.py", "slurm/job.sh.j2", "LICENSE"} <= held
