"""What a submission copies of a script's code, with a real Git."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest

from hpctrain.common.recipes.difference import differences
from hpctrain.common.run.directory import RunDirectory
from hpctrain.common.run.plan import Plan, Script, Slots
from hpctrain.control.resuming.resume import changed_work
from hpctrain.control.schedulers import code_copy
from hpctrain.control.schedulers.code_copy import Code, with_code, write_code


def git(folder: Path, *command: str) -> str:
    settings = ("-c", "user.name=t", "-c", "user.email=t@example.org")
    return subprocess.run(["git", "-C", folder, *settings, *command], check=True, capture_output=True, text=True).stdout


def files_in(folder: Path, names: Iterable[str]) -> Path:
    """A folder with files whose content is their name, or what comes after ``=``; ``>`` makes a link."""
    for text in names:
        name, _, content = text.partition("=")
        name, _, target = name.partition(">")
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        if target:
            (folder / name).symlink_to(target)
        else:
            (folder / name).write_text(content or name)
    return folder


def repository(folder: Path, *names: str, ignored: str = "") -> Path:
    files_in(folder, names)
    (folder / ".gitignore").write_text(ignored)
    git(folder, "init", "-q")
    git(folder, "add", "-A")
    git(folder, "commit", "-q", "-m", "first")
    return folder


def plan_of(script: Path) -> Plan:
    hosts = (Slots(host=socket.gethostname(), slots=1),)
    return Plan(script=Script(path=script), backend="single", ranks=1, hosts=hosts, threads_per_rank=1)


def copied(script: Path, tmp_path: Path) -> tuple[Code, RunDirectory, Plan]:
    code, directory = Code.of(script, copied=True), RunDirectory(tmp_path / "one")
    plan = with_code(plan_of(script), directory, code)
    directory.create(plan)
    write_code(code, directory)
    return code, directory, plan


def copies(folder: Path) -> set[str]:
    """The files in a folder that are no links, nor behind one."""
    found = (Path(place, name) for place, _, names in os.walk(folder) for name in names)
    return {str(path.relative_to(folder)) for path in found if not path.is_symlink()}


def test_a_repository(tmp_path: Path) -> None:
    """With ignored data, an earlier run, one that waits, and a repository within it."""
    project = files_in(tmp_path / "project", ("run/plan.json", "run/events.jsonl", "next/plan.json"))
    files_in(
        project, ("next/submission.json", "src/data/one", "pkg/_version.py", "plans/plan.json", "plans/__init__.py")
    )
    repository(project / "inner", "x.py", "y", ignored="y\n")
    repository(
        project,
        "src/train.py",
        "lib/model.py",
        "out/.gitkeep",
        ignored="data\n_version.py\n/run\n/next\nout/*\n!.gitkeep\n",
    )
    files_in(project, ("src/new.py", "lib/model.py=edited", "pkg/__init__.py", "out/x"))
    code, run, plan = copied(project / "src" / "train.py", tmp_path)
    copy = run.code / "project"
    names = {"src/train.py", "src/new.py", "lib/model.py", "plans/plan.json", "plans/__init__.py"}
    assert copies(copy) == {*names, "pkg/__init__.py", "inner/x.py"}
    assert code.commit == git(project, "rev-parse", "HEAD").strip()
    assert "+edited" in run.code_diff.read_text() and (copy / "lib" / "model.py").read_text() == "edited"
    assert plan.script and (plan.script.path, plan.script.file) == (project / "src/train.py", copy / "src/train.py")
    # What is ignored is seen where it is.
    for name in ("src/data", "pkg/_version.py", "inner/y", "out"):
        assert (copy / name).resolve() == project / name
    assert not any(os.path.lexists(copy / name) for name in ("run", "next", ".git", "inner/.git"))
    # The run itself, beside the project, is not linked into itself.
    assert not os.path.lexists(run.code / "one")


@pytest.mark.parametrize(
    ("names", "ignored", "script", "expected"),
    [
        (("v2/m.py", "current>v2", "train.py"), "", "train.py", {"v2/m.py", "train.py"}),
        (("v2/m.py", "current>v2", "v2/train.py"), "", "current/train.py", {"v2/m.py", "v2/train.py"}),
        (("v2/m.py", "current>v2", "v2/train.py"), "current\n", "current/train.py", {"v2/m.py", "v2/train.py"}),
        (("sub/plan.json", "sub/events.jsonl", "sub/train.py"), "", "sub/train.py", {"sub/train.py"}),
        (("lib.py", "tmp/train.py", "tmp/m.py", "loop>loop"), "tmp\n", "tmp/train.py", {"lib.py", "tmp/train.py"}),
        (("lib.py", "hpctrain-runs/o/code/t.py"), "hpctrain-runs\n", "hpctrain-runs/o/code/t.py", {"lib.py"}),
    ],
)
def test_places_of_scripts(
    tmp_path: Path, names: tuple[str, ...], ignored: str, script: str, expected: set[str]
) -> None:
    """Below links, in folders of runs, and in folders that Git ignores, whose files are then copied."""
    project = repository(tmp_path / "project", *names, ignored=ignored)
    _, run, plan = copied(project / script, tmp_path)
    copy = run.code / "project"
    real = str((project / script).resolve().relative_to(project))
    assert expected | {real} <= copies(copy)
    assert plan.script and plan.script.file.resolve() == copy / real
    if "current>v2" in names:
        assert (copy / "current").resolve() == copy / "v2"
    if script.startswith("tmp"):
        assert not (copy / "tmp" / "m.py").is_symlink()


def test_without_git(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    names = (
        "package/__init__.py",
        ".secret",
        ".hidden/x",
        "env/pyvenv.cfg",
        "env/lib.py",
        "train.py=import sys; sys.path",
    )
    folder = files_in(tmp_path / "top" / "folder", names)
    files_in(tmp_path / "top", ("beside/m.py",))
    code, run, _ = copied(folder / "train.py", tmp_path)
    assert (code.folder, code.commit) == (folder, None)
    assert copies(run.code) == {"folder/train.py", "folder/package/__init__.py"}
    assert (run.code / "folder" / ".hidden").is_symlink() and not run.code_diff.exists()
    # A script may look for modules beside its folder, which is said.
    assert (run.code / "beside" / "m.py").resolve() == tmp_path / "top" / "beside" / "m.py"
    assert "changes sys.path" in capsys.readouterr().err
    for limit in ("_MOST_BYTES", "_MOST_FILES"):
        with monkeypatch.context() as patched:
            patched.setattr(code_copy, limit, 1)
            assert Code.of(folder / "train.py", copied=True).files is None
        assert "--no-copy" in capsys.readouterr().err


def test_a_folder_of_code_with_many_files_that_git_ignores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """They would be as many links."""
    project = repository(tmp_path / "project", "train.py", "data/read.py", *"abcd", ignored="?\n")
    monkeypatch.setattr(code_copy, "_MOST_FILES", 4)
    assert Code.of(project / "train.py", copied=True).files is None
    assert f"{project} has code and more than 4 files" in capsys.readouterr().err


@pytest.mark.parametrize("failing", ["", "inner"])
def test_git_that_does_not_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], failing: str
) -> None:
    """Nothing is copied then, and the warning names the repository."""
    repository(tmp_path / "inner", "x.py")
    project, answer = repository(tmp_path, "train.py"), code_copy._git

    def slow(folder: Path, *command: str) -> str:
        return "" if command[0] == "ls-files" and folder == project / failing else answer(folder, *command)

    monkeypatch.setattr(code_copy, "_git", slow)
    code = Code.of(project / "train.py", copied=True)
    assert code.files is None and code.commit
    assert f"listed no file of {project / failing}, so" in capsys.readouterr().err


def test_paths_of_modules_lead_to_the_copy(tmp_path: Path) -> None:
    """In the rank and in what it starts; a linked folder keeps its name."""
    project = repository(tmp_path / "project", "lib/m.py=WORD = 'then'", "data/x", ignored="data\n")
    show = "import json, m, os, sys; print(json.dumps([m.WORD, sys.path, os.environ['PYTHONPATH']]), flush=True)"
    files_in(project, (f"train.py={show}",))
    (tmp_path / "link").symlink_to(project)
    _, run, _ = copied(project / "train.py", tmp_path)
    files_in(project, ("lib/m.py=WORD = 'now'",))
    searched = [str(tmp_path / "link" / "lib"), str(project), str(project / "data"), *sys.path]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, searched))}
    command = [sys.executable, "-P", "-m", "hpctrain.worker.train", str(run.path)]
    subprocess.run(command, check=True, cwd=project, env=environment, timeout=120)
    printed = next(line for line in run.log(0).read_text().splitlines() if line.startswith("["))
    word, entries, variable = json.loads(printed)
    copy = run.code / "project"
    assert word == "then"
    assert {str(copy), str(copy / "lib"), str(project / "data")} <= {*entries}
    assert not {str(project), str(tmp_path / "link" / "lib")} & {*entries, *variable.split(os.pathsep)}


def test_a_submitted_script_is_compared_by_where_it_was(tmp_path: Path) -> None:
    project = repository(tmp_path / "project", "t.py")
    _, _, plan = copied(project / "t.py", tmp_path)
    again = Script(path=project / "t.py")
    assert plan.script and "path" not in differences(plan.script, again)
    assert changed_work(plan, again) == (plan, {})
    # Accepted changes continue with the code that was submitted.
    changed, _ = changed_work(plan, again.model_copy(update={"arguments": ("x",)}), accept=True)
    assert changed.script and changed.script.copied == plan.script.copied
