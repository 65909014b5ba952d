"""Batch norm over groups of four real ranks equals one process on what the ranks of a group compute together."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch")

PROGRAM = Path(__file__).parent / "programs" / "batch_norm.py"


@pytest.mark.parametrize(
    ("framework", "backend"),
    [("torch", "mpi"), ("keras", "mpi"), pytest.param("torch", "gloo", marks=pytest.mark.thorough)],
)
@pytest.mark.long
def test_a_group_of_ranks_equals_one_process_on_the_joined_batch(mpirun, framework, backend):
    pytest.importorskip(framework)
    said = mpirun(PROGRAM, 4, framework, backend).stdout
    assert (said.count("2 ranks agree"), said.count("4 ranks agree")) == (2, 1)
