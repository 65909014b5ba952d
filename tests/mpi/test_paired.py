"""Calls of the control plane that do not belong together are never paired: all ranks are told, and none goes on."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from support.refusals import codes

pytest.importorskip("torch")

PROGRAM = Path(__file__).parent / "programs" / "paired.py"


@pytest.mark.parametrize(
    ("ranks", "backend"),
    [
        (2, "mpi"),
        pytest.param(2, "gloo", marks=pytest.mark.long),
        *(pytest.param(3, each, marks=pytest.mark.thorough) for each in ("mpi", "gloo", "horovod")),
    ],
)
def test_each_two_different_calls_are_refused_on_all_ranks(mpirun, ranks, backend):
    result = mpirun(PROGRAM, ranks, backend, check=False)
    assert result.stdout.count("pair refused") == ranks, result.stdout
    # The call of rank 0 alone at the end does not get what hpctrain sends there.
    assert result.returncode != 0
    assert "['mine'" not in result.stdout
    assert "at the end of its script" in result.stdout
    assert "HT-ranks-in-different-calls" in codes(result.stdout)


def test_a_script_that_one_rank_leaves_early_is_told(hpctrain, tmp_path):
    script = "import sys\nimport hpctrain as ht\ncomm = ht.init()\nif comm.rank == 1:\n    sys.exit()\ncomm.barrier()\n"
    (tmp_path / "early.py").write_text(script)
    result = hpctrain("run", "early.py", "-np", "2", "--oversubscribe", "--backend", "mpi", "--run-dir", "run")
    assert result.returncode == 1
    failure = json.loads((tmp_path / "run" / "summary.json").read_text())["failure"]
    assert failure["code"] == "HT-ranks-in-different-calls"
    assert re.search(r"rank 0\b[^;]*early\.py:6\b", failure["message"])
    assert re.search(r"rank 1\b[^;]*at the end of its script", failure["message"])
