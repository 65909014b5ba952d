"""A rank that stops in the middle of a pipeline's step is named by the others, with its stage and what it did."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from support.refusals import codes

pytest.importorskip("torch")

PROGRAM = Path(__file__).parent / "programs" / "hung_stage.py"
SECONDS = "4"
thorough = pytest.mark.thorough


def errors(mpirun: Any, ranks: int, *arguments: str, **variables: str) -> list[dict[str, Any]]:
    """The errors of the ranks that do not hang."""
    variables = {"HPCTRAIN_TIMEOUT": SECONDS, "HPCTRAIN_STALL": "60", **variables}
    result = mpirun(PROGRAM, ranks, *arguments, check=False, timeout=300, **variables)
    assert result.returncode != 0, result.stdout
    found = [json.loads(line) for line in result.stdout.splitlines() if line.startswith('{"code"')]
    assert len(found) == ranks - 1, result.stdout
    return found


OWED = r"(sends|receives) (activations|gradients) of micro-batch \d (to|from) stage \d"


@pytest.mark.parametrize("ranks", [3, pytest.param(2, marks=thorough)])
@pytest.mark.parametrize(
    ("backend", "schedule"),
    [
        ("gloo", "1f1b"),
        *(pytest.param("gloo", each, marks=thorough) for each in ("gpipe", "looped_bfs", "interleaved_1f1b", "zbv")),
        pytest.param("gloo", "interleaved_zero_bubble", marks=thorough),
        pytest.param("mpi", "1f1b", marks=thorough),
        pytest.param("mpi", "zbv", marks=thorough),
    ],
)
def test_a_stopped_rank_is_named_with_what_it_owes(mpirun, backend, schedule, ranks):
    for each in errors(mpirun, ranks, backend, schedule, "stop"):
        assert (each["code"], each["exit_code"]) == ("HT-pipeline-step-hangs", 4)
        values = each["values"]
        assert values["rank"] == each["hangs"]
        assert re.fullmatch(OWED, values["action"]), values
        assert re.fullmatch(OWED, values["waiting"]), values
        assert 3 < values["seconds"] < 60


@pytest.mark.parametrize(
    ("how", "schedule", "action"),
    [
        ("sleep", "zbv", "forward of micro-batch 1"),
        pytest.param("sleep", "1f1b", "forward of micro-batch 1", marks=thorough),
        pytest.param("backward", "1f1b", "backward of micro-batch 1", marks=thorough),
        pytest.param("backward", "interleaved_zero_bubble", "backward of micro-batch 1", marks=thorough),
        pytest.param("absent", "1f1b", "begins the step with the other stages", marks=thorough),
        pytest.param("evaluate", "gpipe", "sends activations of an evaluation to stage 2", marks=thorough),
    ],
)
def test_what_a_rank_does_that_others_wait_for_is_named(mpirun, how, schedule, action):
    for each in errors(mpirun, 3, "gloo", schedule, how):
        values = each["values"]
        assert each["code"] == "HT-pipeline-step-hangs"
        assert values["rank"] == each["hangs"]
        if how != "evaluate" or each["on"] == 2:  # Rank 0 has sent all.
            assert values["action"] == action
        if how in ("sleep", "backward"):
            assert values["stage"] == each["in"]


@thorough
def test_a_rank_that_no_error_ends_is_ended_beside_its_call(mpirun):
    """As over NCCL, whose calls do not wait."""
    result = mpirun(PROGRAM, 2, "gloo", "1f1b", "thread", check=False, timeout=300, HPCTRAIN_TIMEOUT="250")
    assert result.returncode == 4
    assert codes(result.stdout) == ["HT-pipeline-step-hangs"]
