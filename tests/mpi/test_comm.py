"""The control plane on real ranks: the right values, and a limit to every wait."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from support.refusals import codes

PROGRAM = Path(__file__).parent / "programs" / "comm_control.py"


@pytest.mark.parametrize(("ranks", "backend"), [(1, "mpi"), (2, "horovod")])
def test_collectives_agree_with_closed_forms(mpirun, ranks, backend):
    result = mpirun(PROGRAM, ranks, HPCTRAIN_BACKEND=backend)
    assert result.stdout.count("collectives agree") == ranks
    assert result.stdout.count(f"backend {backend} (asked for)") == 1


@pytest.mark.parametrize("backend", ["mpi", pytest.param("gloo", marks=pytest.mark.long)])
def test_they_agree_and_a_rank_that_does_not_come_then_is_reported_within_the_limit(mpirun, backend):
    result = mpirun(PROGRAM, 3, "stall", check=False, timeout=200, HPCTRAIN_TIMEOUT="2", HPCTRAIN_BACKEND=backend)
    assert result.returncode == 4, result.stdout
    assert result.stdout.count("collectives agree") == 3
    assert "HT-wait-timed-out" in codes(result.stdout)
    told = next(line for line in result.stdout.splitlines() if "HT-wait-timed-out" in line)
    assert re.search(r"rank [02]\b.* 2 s .*rank 1\b", told)


def test_a_rank_that_never_starts_mpi_is_not_waited_for_for_ever(mpirun, tmp_path):
    program = tmp_path / "late.py"
    program.write_text("""\
import os, time
if os.environ["OMPI_COMM_WORLD_RANK"] == "1":
    time.sleep(600)
import hpctrain as ht
ht.init("mpi")
""")
    result = mpirun(program, 2, check=False, timeout=120, HPCTRAIN_TIMEOUT="1")
    assert result.returncode == 1, result.stdout
    assert "Timeout (0:00:11)!" in result.stdout
    assert "in mpi_world" in result.stdout
