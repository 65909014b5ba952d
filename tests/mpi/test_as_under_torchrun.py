"""A script lives on the ranks of ``hpctrain run`` as on those of torchrun: exit status, files, output and handlers."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from support.launching import Launch

pytest.importorskip("torch")

PROGRAMS = Path(__file__).parent / "programs" / "as_under_torchrun"
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]


def files(folder: Path) -> dict[str, str]:
    """What the ranks have written, without what belongs to the launcher."""
    return {each.name: each.read_text() for each in folder.iterdir() if each.is_file()}


def by_torchrun(folder: Path, program: Path) -> tuple[bool, dict[str, str]]:
    folder.mkdir()
    command = [*TORCHRUN, str(program)]
    result = subprocess.run(command, check=False, cwd=folder, capture_output=True, timeout=300, stdin=subprocess.DEVNULL)
    return result.returncode == 0, files(folder)


@pytest.mark.parametrize("program", ["ends", "fails"])
def test_exit_status_and_files_are_those_of_torchrun(hpctrain: Launch, tmp_path: Path, program: str) -> None:
    path = PROGRAMS / f"{program}.py"
    result = hpctrain("run", str(path), "-np", "2", "--run-dir", "run")
    assert (result.returncode == 0, files(tmp_path)) == by_torchrun(tmp_path / "reference", path), result.stdout
