"""Ranks that left the training, or take part in something that the others do not, are named at once."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from support.refusals import codes

pytest.importorskip("torch")

PROGRAM = Path(__file__).parent / "programs" / "crossed.py"


@pytest.mark.long
def test_a_loop_that_ends_early_on_one_rank(mpirun):
    # Ranks that only waited would name nobody before 60 s, in other words, and give up after 600.
    result = mpirun(PROGRAM, 3, "mpi", "early", check=False)
    assert result.returncode != 0
    assert "HT-ranks-in-different-places" in codes(result.stdout)
    for place in (r"crossed\.py:\d+, .*pass 6\b", r"end .*pass 5\b"):
        assert re.search(place, result.stdout)


def test_a_collective_of_one_rank_alone(mpirun):
    result = mpirun(PROGRAM, 2, "mpi", "stop", check=False)
    assert result.returncode != 0
    assert "HT-ranks-in-different-places" in codes(result.stdout)
    place = r"\(max\) .*crossed\.py:\d+, .*pass 1\b"
    assert re.search(place, result.stdout)


@pytest.mark.long
def test_a_rank_that_is_late_ends_nothing(mpirun):
    assert mpirun(PROGRAM, 2, "mpi", "slow").stdout.count("through") == 2


def test_a_script_that_one_rank_leaves_early_is_told_with_its_line(hpctrain, tmp_path):
    script = "import sys\nimport hpctrain as ht\ncomm = ht.init()\nif comm.rank == 1:\n    sys.exit()\ncomm.barrier()\n"
    (tmp_path / "early.py").write_text(script)
    result = hpctrain("run", "early.py", "-np", "2", "--oversubscribe", "--backend", "mpi", "--run-dir", "run")
    assert result.returncode == 1
    failure = json.loads((tmp_path / "run" / "summary.json").read_text())["failure"]
    assert failure["code"] == "HT-ranks-in-different-calls"
    assert re.search(r"rank 0\b[^;]*early\.py:6\b", failure["message"])
    assert re.search(r"rank 1\b[^;]*early\.py:5\b", failure["message"])
