"""A GradScaler on replicas and meshes makes the steps of one process, and leaves out the same ones."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from support.imported_programs import imported

pytest.importorskip("torch")

PROGRAM = Path(__file__).parent / "programs" / "grad_scaler.py"
program = imported(PROGRAM)


@pytest.mark.parametrize(("ranks", "backend"), [(2, "gloo"), pytest.param(3, "mpi", marks=pytest.mark.thorough)])
@pytest.mark.long
def test_as_one_process(mpirun, tmp_path, ranks, backend):
    mpirun(PROGRAM, ranks, str(tmp_path / "out"), backend)
    results = [json.loads((tmp_path / f"out-{rank}.json").read_text()) for rank in range(ranks)]
    for case in program.CASES:
        wanted = program.trained(case)
        assert min(wanted["scales"]) < 8, "nothing overflowed"
        for found in (each[f"{case}/{place}"] for place in program.PLACES for each in results):
            assert found["scales"] == wanted["scales"], case
            assert np.abs(np.subtract(found["parameters"], wanted["parameters"])).max() < 1e-10, case
