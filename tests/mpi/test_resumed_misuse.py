"""What a script that is resumed, or that saves a sharded model, is told."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

pytest.importorskip("torch")

PROGRAM = Path(__file__).parent / "programs" / "resumed_misuse.py"
BEGIN_AGAIN = "this run was resumed, but its data begin again"


@pytest.mark.long
def test_a_resumed_script_without_a_place_is_told_once_and_so_is_one_that_saves_a_part(hpctrain, tmp_path):
    run = ["run", str(PROGRAM), "-np", "2", "--backend", "gloo", "--run-dir"]
    first = hpctrain(*run, "run", "--", "fail")
    assert first.returncode != 0
    assert BEGIN_AGAIN not in first.stdout
    before, saved = first.stdout.split("whole saved")
    share = "((4, 4) of (8, 4))"
    assert "pickles" not in before and saved.count("pickles") == saved.count(share) == 1
    shutil.copytree(tmp_path / "run", tmp_path / "other")
    again = hpctrain("run", "--resume", "--run-dir", "run")
    assert again.stdout.count(BEGIN_AGAIN) == 1, again.stdout
    # The plan keeps what the script was started with.
    plan = tmp_path / "other" / "plan.json"
    plan.write_text(plan.read_text().replace('"fail"', '"set_epoch"'))
    placed = hpctrain("run", "--resume", "--run-dir", "other", "--accept-changes")
    assert placed.returncode == 0, placed.stdout
    assert BEGIN_AGAIN not in placed.stdout
