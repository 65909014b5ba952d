"""torch.distributed's process group "hpctrain" on real ranks: every collective, on several arrangements of nodes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from support.refusals import codes

PROGRAM = Path(__file__).parent / "programs" / "process_group.py"
CHECKS = ("layouts", "misuse", "different_calls")


@pytest.mark.long
def test_collectives_agree_with_numpy_on_every_arrangement_of_nodes(mpirun):
    result = mpirun(PROGRAM, 4, *CHECKS, timeout=500)
    for check in CHECKS:
        assert result.stdout.count(f"{check} agrees") == 4


@pytest.mark.long
def test_a_rank_that_does_not_come_is_named_and_ends_the_run_in_time(mpirun):
    """Rank 0 is elsewhere too, and is not of the group."""
    result = mpirun(PROGRAM, 3, "stall", check=False, timeout=300, HPCTRAIN_STALL="1", HPCTRAIN_TIMEOUT="4")
    assert result.returncode == 4, result.stdout
    assert "HT-wait-timed-out" in codes(result.stdout)
    for told in (r"waited 4 s .*rank 2 .*all_reduce \(SUM\) of 50000", r"^hpctrain: .*rank [12] .*stalled: "):
        assert re.search(told, result.stdout, re.M), result.stdout
