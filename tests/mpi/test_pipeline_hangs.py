"""A rank that stops in the middle of a pipeline's step is named by the others."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from support.refusals import codes

pytest.importorskip("torch")

PROGRAM = Path(__file__).parent / "programs" / "hung_stage.py"
thorough = pytest.mark.thorough


@pytest.mark.long
@pytest.mark.parametrize(
    ("backend", "schedule"),
    [
        ("gloo", "1f1b"),
        pytest.param("gloo", "zbv", marks=thorough),
        pytest.param("mpi", "1f1b", marks=thorough),
        pytest.param("mpi", "zbv", marks=thorough),
    ],
)
def test_a_stopped_rank_is_named(mpirun, backend, schedule):
    result = mpirun(PROGRAM, 3, backend, schedule, check=False, timeout=300, HPCTRAIN_TIMEOUT="4", HPCTRAIN_STALL="60")
    assert result.returncode != 0, result.stdout
    assert set(codes(result.stdout)) == {"HT-wait-timed-out"}, result.stdout
    assert re.search(r"waited 4 s for rank 1 on ", result.stdout), result.stdout
