"""Who may look into what a run leaves: its owner alone, whatever the umask."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from hpctrain.cli.main import main
from hpctrain.common.files.regular import make_folder
from support import needs

_OTHERS = 0o077


@pytest.fixture(params=[0o022, 0o000], ids=["umask 022", "umask 000"], autouse=True)
def _umask(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    before = os.umask(request.param)
    try:
        yield
    finally:
        os.umask(before)


def _mode(path: Path) -> int:
    return path.stat().st_mode & 0o777


def _open_to_others(run: Path) -> list[str]:
    """What others may read or change where somebody opens the folder that it is in."""
    return sorted(f"{path} {_mode(path):03o}" for path in run.rglob("*") if _mode(path) & _OTHERS)


@pytest.mark.long
def test_a_run_and_what_is_resumed_of_it_are_private() -> None:
    """A script that leaves, and goes on; in a directory that is made, below folders that are made too."""
    Path("train.py").write_text("import sys\nprint('here')\nsys.exit(4)\n")
    run = Path("new") / "runs" / "one"
    start = ["run", "train.py", "--backend", "single", "-np", "1", "--run-dir", str(run)]
    assert main(start) == 1
    assert main(["run", "--resume", "--run-dir", str(run)]) == 1
    assert main(["report", str(run)]) == 0
    assert _mode(run) == 0o700
    assert {"plan.json", "events.jsonl", "report.html", "logs", "ranks", "lock"} <= {
        path.name for path in run.iterdir()
    }
    assert not _open_to_others(run)
    assert {_mode(folder) for folder in (Path("new"), Path("new/runs"))} == {0o700}


# Those of 022 are fewer.
@pytest.mark.long
@pytest.mark.parametrize("_umask", [0o000], indirect=True)
@needs.pytorch
def test_a_recipe_leaves_nothing_open() -> None:
    """Checkpoints and curves as well, in a directory that was there, and whose mode is its owner's business."""
    run = Path("run")
    run.mkdir()
    mode = _mode(run)
    short = ["--set", "epochs=1", "--set", "schedule.warmup_epochs=0", "--set", "data.test_fraction=0.9"]
    assert main(["run", "digits", "--backend", "single", "-np", "1", "--run-dir", "run", *short]) == 0
    assert list((run / "checkpoints").iterdir()) and (run / "tensorboard").is_dir()
    assert _mode(run) == mode
    assert not _open_to_others(run)


@needs.pytorch
def test_a_job_is_private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sbatch = tmp_path / "bin" / "sbatch"
    sbatch.parent.mkdir()
    sbatch.write_text("#!/bin/sh\necho 12\n")
    sbatch.chmod(0o755)
    monkeypatch.setenv("PATH", f"{sbatch.parent}:{os.environ['PATH']}")
    run = Path("run")
    assert main(["submit", "digits", "--cluster", "generic", "--nodes", "2", "--run-dir", "run"]) == 0
    assert _mode(run) == 0o700
    assert {"plan.json", "job.sh", "submission.json", "logs"} <= {path.name for path in run.iterdir()}
    assert not _open_to_others(run)


def test_a_folder_is_made_once() -> None:
    made = Path("a/b")
    make_folder(made)
    assert (_mode(made), _mode(made.parent)) == (0o700, 0o700)
    make_folder(made)
    with pytest.raises(FileExistsError):
        make_folder(made, exist_ok=False)
