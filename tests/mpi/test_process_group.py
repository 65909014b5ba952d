"""torch.distributed's process group "hpctrain" on real ranks: every collective, on several arrangements of nodes."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parent / "programs" / "process_group.py"
CHECKS = ("layouts", "misuse", "growth", "different_calls")


@pytest.mark.long
def test_collectives_agree_with_numpy_on_every_arrangement_of_nodes(mpirun):
    result = mpirun(PROGRAM, 4, *CHECKS, timeout=500)
    for check in CHECKS:
        assert result.stdout.count(f"{check} agrees") == 4


STALLS = {
    # rank 0 is elsewhere too, and is not of the group
    "stall": "rank 2 on {host} in all_reduce (SUM) of 50000 float32",
    "functional_stall": "rank 1 on {host} in all_gather_single of 5 float32",
    "message_stall": "rank 1 on {host} in receive of 20 bytes from rank 1",
}


@pytest.mark.long
@pytest.mark.parametrize(
    ("check", "more"),
    [
        ("stall", ()),
        *(pytest.param(check, (), marks=pytest.mark.thorough) for check in STALLS if check != "stall"),
        pytest.param("stall", ("later",), marks=pytest.mark.thorough),
    ],
)
def test_a_rank_that_does_not_come_is_named_and_ends_the_run_in_time(mpirun, check, more):
    began = time.monotonic()
    result = mpirun(PROGRAM, 3, check, *more, check=False, timeout=100, HPCTRAIN_STALL="1", HPCTRAIN_TIMEOUT="4")
    assert time.monotonic() - began < 45
    assert result.returncode == 4, result.stdout
    wanted = re.escape(STALLS[check]).replace(r"\{host\}", r"\S+")
    assert re.search(rf"rank \d on \S+ waited 4 s for {wanted}", result.stdout), result.stdout
    assert re.search(r"^hpctrain: .*rank [12] on \S+ stalled: the others have been waiting", result.stdout, re.M), (
        result.stdout
    )


def test_a_rank_that_dies_ends_the_run(mpirun):
    began = time.monotonic()
    result = mpirun(PROGRAM, 3, "death", check=False, timeout=100)
    assert time.monotonic() - began < 45
    assert result.returncode != 0
    assert "agrees" not in result.stdout


def test_a_script_that_just_ends_gives_everything_back(mpirun):
    assert mpirun(PROGRAM, 2, "exit").stdout.count("exit agrees") == 2


@pytest.mark.long
def test_what_torch_builds_on_process_groups_equals_one_process(mpirun):
    output = mpirun(PROGRAM.with_name("parallel_over_group.py"), 4).stdout
    for what in ("ddp", "fsdp", "hsdp", "narrow", "tensor parallel", "gpipe", "1f1b"):
        assert output.count(f"{what} agrees") == 4, output
