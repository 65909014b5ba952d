"""What a submission copies of a script's code, with a real Git."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from hpctrain.common.run.directory import RunDirectory
from hpctrain.control.schedulers import code_copy
from hpctrain.control.schedulers.code_copy import Code, write_code


def git(folder: Path, *command: str) -> str:
    settings = ("-c", "user.name=t", "-c", "user.email=t@example.org")
    return subprocess.run(["git", "-C", folder, *settings, *command], check=True, capture_output=True, text=True).stdout


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A repository with code, ignored data, an earlier run, and a repository within it."""
    project = tmp_path / "project"
    for name in ("src/train.py", "src/new.py", "lib/model.py", "src/data/one", "run/plan.json", "inner/x.py"):
        (project / name).parent.mkdir(parents=True, exist_ok=True)
        (project / name).write_text(name)
    (project / ".gitignore").write_text("data\n")
    for folder in (project / "inner", project):
        git(folder, "init", "-q")
        git(folder, "add", "-A", ".", ":!src/new.py", ":!run")
        git(folder, "commit", "-q", "-m", "first")
    (project / "lib" / "model.py").write_text("edited")
    return project


def copied(script: Path, tmp_path: Path) -> tuple[Code, RunDirectory]:
    code, directory = Code.of(script, copied=True), RunDirectory(tmp_path / "one")
    directory.path.mkdir()
    write_code(code, script, directory)
    return code, directory


def test_a_repository(project: Path, tmp_path: Path) -> None:
    code, run = copied(project / "src" / "train.py", tmp_path)
    files = (path for path in run.code.rglob("*") if path.is_file() and not path.is_symlink())
    names = {".gitignore", "src/train.py", "src/new.py", "lib/model.py"}
    assert {str(path.relative_to(run.code)) for path in files} == names
    assert code.commit == git(project, "rev-parse", "HEAD").strip()
    assert "+edited" in run.code_diff.read_text() and (run.code / "lib" / "model.py").read_text() == "edited"
    # What is ignored, and a repository within this one, are seen where they are.
    for name in ("src/data", "inner"):
        assert (run.code / name).resolve() == project / name
    assert not (run.code / "run").exists()


def test_without_git(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "folder"
    for name in ("train.py", ".secret", "package/__init__.py", ".hidden/x", "env/pyvenv.cfg", "env/lib.py"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name)
    code, run = copied(folder / "train.py", tmp_path)
    assert (code.folder, code.commit) == (folder, None)
    assert {*map(str, code.files or ())} == {"train.py", "package/__init__.py"}
    assert (run.code / ".hidden").is_symlink() and not run.code_diff.exists()
    monkeypatch.setattr(code_copy, "_MOST_BYTES", 10)
    assert Code.of(folder / "train.py", copied=True).files is None
    assert "--no-copy" in capsys.readouterr().err
