"""Calls of the control plane that do not belong together are never paired: all ranks are told, and none goes on."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.refusals import codes

pytest.importorskip("torch")

PROGRAM = Path(__file__).parent / "programs" / "paired.py"


@pytest.mark.parametrize(
    ("ranks", "backend"),
    [
        (2, "mpi"),
        pytest.param(2, "gloo", marks=pytest.mark.long),
        *(pytest.param(3, each, marks=pytest.mark.thorough) for each in ("mpi", "gloo", "horovod")),
    ],
)
def test_each_two_different_calls_are_refused_on_all_ranks(mpirun, ranks, backend):
    result = mpirun(PROGRAM, ranks, backend, check=False)
    assert result.stdout.count("pair refused") == ranks, result.stdout
    # The call of rank 0 alone at the end does not get what hpctrain sends there.
    assert result.returncode != 0
    assert "['mine'" not in result.stdout
    assert "at the end of its script" in result.stdout
    assert set(codes(result.stdout)) & {"HT-ranks-in-different-calls", "HT-ranks-in-different-places"}
