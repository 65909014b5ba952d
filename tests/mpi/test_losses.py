"""Losses that are not means over samples: the numbers of one process."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("torch")

PROGRAM = Path(__file__).parent / "programs" / "losses.py"
DIVISIONS = ("even", "uneven", "small")


# Of each kind one; the others are the long test's.
QUICK = ("tokens_of_padded_sentences", "accumulated_with_one_count", "two_denominators_and_a_mean_over_samples")


def test_losses_divided_by_tokens_equal_one_process(mpirun, tmp_path):
    mpirun(PROGRAM, 2, "mpi", str(tmp_path / "out"), *QUICK, "padded_sentences", HPCTRAIN_TIMEOUT="120")
    _check_all(tmp_path, 2, "mpi", 4)


@pytest.mark.parametrize(
    ("ranks", "backend"),
    [
        pytest.param(2, "mpi", marks=pytest.mark.long),
        pytest.param(3, "mpi", marks=pytest.mark.thorough),
        pytest.param(2, "gloo", marks=pytest.mark.thorough),
        pytest.param(3, "gloo", marks=pytest.mark.thorough),
    ],
)
def test_each_loss_equals_one_process(mpirun, tmp_path, ranks, backend):
    # One start of the ranks serves every loss.
    mpirun(PROGRAM, ranks, backend, str(tmp_path / "out"), timeout=400, HPCTRAIN_TIMEOUT="120")
    _check_all(tmp_path, ranks, backend, 60)


def _check_all(folder, ranks, backend, least):
    for rank in range(ranks):
        results = json.loads((folder / f"out-{backend}-{rank}.json").read_text())
        assert len(results) >= least
        for name, of_divisions in results.items():
            for division in DIVISIONS:
                _check(f"{name}, {division}, rank {rank}", of_divisions[division])


def _check(where, found):
    assert not found["refused"], (where, found["refused"])
    assert found["error"] < 1e-10, where
    assert found["updates"] == found["expected"] > 0, where
