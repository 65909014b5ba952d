"""A short campaign over mutated run directories; ``run_directories.py`` has the long one."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpctrain.cli.main import main
from support.fuzz.run_directories import add_rare_events, cases, index, warm_up


@pytest.mark.long
def test_no_directory_hurts(tmp_path: Path) -> None:
    run = tmp_path / "trained"
    assert main(["run", "digits", "--smoke", "-np", "2", "--oversubscribe", "--run-dir", str(run)]) == 0
    add_rare_events(run)
    index(run)
    warm_up(run)
    (folder := tmp_path / "cases").mkdir()
    assert [each for each in cases(run, range(300), folder) if each[2]] == []
