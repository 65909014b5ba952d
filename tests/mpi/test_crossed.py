"""Ranks that take part in something that the others do not, or have left, are named at once."""

from __future__ import annotations

import json
import re

import pytest

from support.refusals import codes

pytest.importorskip("torch")

# One rank asks whether it should stop, while the others train on.
_STOPS = """
import torch
import hpctrain as ht

comm = ht.init("mpi")
model = torch.nn.Linear(300, 300)
model, optimizer = ht.distribute(model, torch.optim.SGD(model.parameters(), lr=0.01))
for step in range(2):
    if comm.rank == 1 and step == 1:
        ht.should_stop()
    optimizer.zero_grad()
    model(torch.ones(2, 300)).sum().backward()
    optimizer.step()
"""


def test_a_collective_of_one_rank_alone(mpirun, tmp_path):
    (tmp_path / "stops.py").write_text(_STOPS)
    # Ranks that only waited would name nobody before 60 s, in other words, and give up after 600.
    result = mpirun(tmp_path / "stops.py", 2, check=False)
    assert result.returncode != 0
    assert "HT-ranks-in-different-places" in codes(result.stdout)
    assert re.search(r"\(max\) .*stops\.py:\d+, .*pass 1\b", result.stdout)


def test_a_script_that_one_rank_leaves_early_is_told_with_its_line(hpctrain, tmp_path):
    script = "import sys\nimport hpctrain as ht\ncomm = ht.init()\nif comm.rank == 1:\n    sys.exit()\ncomm.barrier()\n"
    (tmp_path / "early.py").write_text(script)
    result = hpctrain("run", "early.py", "-np", "2", "--oversubscribe", "--backend", "mpi", "--run-dir", "run")
    assert result.returncode == 1
    failure = json.loads((tmp_path / "run" / "summary.json").read_text())["failure"]
    assert failure["code"] == "HT-ranks-in-different-calls"
    assert re.search(r"rank 0\b[^;]*early\.py:6\b", failure["message"])
    assert re.search(r"rank 1\b[^;]*early\.py:5\b", failure["message"])
