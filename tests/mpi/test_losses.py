"""Losses that are not means over samples: the numbers of one process, or a refusal before a wrong update."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("torch")

PROGRAM = Path(__file__).parent / "programs" / "losses.py"
DIVISIONS = ("even", "uneven", "small")


@pytest.mark.parametrize(
    ("ranks", "backend"),
    [
        (2, "mpi"),
        pytest.param(3, "mpi", marks=pytest.mark.thorough),
        pytest.param(2, "gloo", marks=pytest.mark.thorough),
        pytest.param(3, "gloo", marks=pytest.mark.thorough),
    ],
)
def test_each_loss_equals_one_process_or_is_refused(mpirun, tmp_path, ranks, backend):
    # One start of the ranks serves every loss.
    mpirun(PROGRAM, ranks, backend, str(tmp_path / "out"), timeout=400, HPCTRAIN_TIMEOUT="120")
    for rank in range(ranks):
        results = json.loads((tmp_path / f"out-{backend}-{rank}.json").read_text())
        assert len(results) > 20
        for name, of_divisions in results.items():
            for division in DIVISIONS:
                _check(f"{name}, {division}, rank {rank}", of_divisions[division])


def _check(where, found):
    assert found["error"] < 1e-10, where
    assert not found["refused"], (where, found["refused"])
    assert found["updates"] == found["expected"] > 0, where
