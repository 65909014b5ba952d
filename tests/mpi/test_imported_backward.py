"""A ``backward`` that a script imported before hpctrain: nobody is told of its passes, and their end still counts."""

from __future__ import annotations

from pathlib import Path

PROGRAM = Path(__file__).parent / "programs" / "imported_backward.py"


def test_divided_models_equal_one_process(mpirun):
    mpirun(PROGRAM, 2, HPCTRAIN_TIMEOUT="60")
