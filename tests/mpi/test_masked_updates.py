"""Updates that are given to the device before ranks know whether gradients are finite, on two ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch")

PROGRAM = Path(__file__).parent / "programs" / "masked_updates.py"


@pytest.mark.parametrize("backend", ["gloo", pytest.param("mpi", marks=pytest.mark.thorough)])
@pytest.mark.long
def test_ranks_leave_out_the_steps_that_they_left_out_before(mpirun, backend):
    assert mpirun(PROGRAM, 2, backend).stdout.count("is through") == 2
