"""The control plane on real ranks: the right values, and a limit to every wait."""

from __future__ import annotations

from pathlib import Path

import pytest

PROGRAM = Path(__file__).parent / "programs" / "comm_control.py"


@pytest.mark.parametrize(("ranks", "backend"), [(1, "mpi"), (2, "horovod"), (3, "mpi")])
def test_collectives_agree_with_closed_forms(mpirun, ranks, backend):
    result = mpirun(PROGRAM, ranks, HPCTRAIN_BACKEND=backend)
    assert result.stdout.count("collectives agree") == ranks
    assert result.stdout.count(f"backend {backend} (asked for)") == 1


def test_a_rank_that_does_not_come_is_reported_within_the_limit(mpirun):
    result = mpirun(PROGRAM, 2, "stall", check=False, timeout=200, HPCTRAIN_TIMEOUT="2", HPCTRAIN_BACKEND="mpi")
    assert result.returncode == 4, result.stdout
    assert "rank 0 on" in result.stdout and "waited 2 s for rank 1 on" in result.stdout
