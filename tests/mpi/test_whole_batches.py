"""Small programs as people write them train on ranks as on one process, to the last digits but few."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("torch")

PROGRAM = Path(__file__).parent / "programs" / "whole_batches.py"
# What PyTorch does not tell of, by the code of its refusal.
REFUSED: dict[str, str] = {}


@pytest.mark.parametrize(
    ("ranks", "backend"),
    [
        pytest.param(2, "mpi", marks=pytest.mark.long),
        pytest.param(3, "gloo", marks=pytest.mark.long),
    ],
)
def test_each_program_equals_one_process(mpirun, tmp_path, ranks, backend):
    # One start of the ranks serves all programs.
    mpirun(PROGRAM, 1, str(tmp_path / "one"))
    mpirun(PROGRAM, ranks, str(tmp_path / "out"), HPCTRAIN_TIMEOUT="120", HPCTRAIN_BACKEND=backend)
    whole = json.loads((tmp_path / "one-0.json").read_text())
    results = [json.loads((tmp_path / f"out-{rank}.json").read_text()) for rank in range(ranks)]
    assert len(whole) > 80
    for name, one in whole.items():
        assert not one["refused"], name
        for result in results:
            assert result[name]["refused"] == REFUSED.get(name, ""), result[name].get("trace")
            if name not in REFUSED:
                assert result[name]["values"] == pytest.approx(one["values"], rel=1e-9, abs=1e-9), name
