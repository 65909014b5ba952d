"""Workers of data loaders outlive the signals that ask their rank to stop, but not their rank."""

from __future__ import annotations

import time
from pathlib import Path

import psutil
import pytest

from hpctrain.common.run.stopping import RESUMABLE
from support.launching import Launch

pytest.importorskip("torch")

PROGRAM = Path(__file__).parent / "programs" / "stopped_loader.py"


@pytest.mark.parametrize("start", ["fork", pytest.param("spawn", marks=pytest.mark.thorough)])
def test_workers_outlive_the_signals_that_stop_their_rank(hpctrain: Launch, tmp_path: Path, start: str) -> None:
    result = hpctrain("run", str(PROGRAM), "-np", "2", "--run-dir", "run", "--", start)
    assert result.returncode == RESUMABLE, result.stdout
    assert [(tmp_path / f"saved-{rank}").exists() for rank in range(2)] == [True, True]
    workers = [int(line) for rank in range(2) for line in (tmp_path / f"workers-{rank}.txt").read_text().split()]
    assert len(workers) == len([*tmp_path.glob("initialised-*")]) == 4
    deadline = time.monotonic() + 5
    while any(psutil.pid_exists(worker) for worker in workers):
        assert time.monotonic() < deadline
        time.sleep(0.1)
