"""A short campaign over changed run directories; ``run_directories.py`` has the long one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from hpctrain.cli.main import main
from support.fuzz import run_directories


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("fuzz") / "run"
    assert main(["run", "digits", "--smoke", "-np", "2", "--oversubscribe", "--run-dir", str(run)]) == 0
    return run


@pytest.mark.long
def test_no_directory_hurts(trained: Path, tmp_path: Path) -> None:
    # In a process of its own: its children's memory begins with its own, and a process of tests may hold much.
    campaign = subprocess.run(
        [sys.executable, run_directories.__file__, str(trained), "0", "30"],
        cwd=tmp_path,
        env={**os.environ, "TMPDIR": str(tmp_path), "PYTHONPATH": str(Path(run_directories.__file__).parents[2])},
        capture_output=True,
        text=True,
        check=False,
        timeout=500,
    )
    assert campaign.returncode == 0, campaign.stdout + campaign.stderr
