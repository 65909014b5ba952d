"""Optimizers that hold others, lists of their own or a state give the numbers of one process, or are refused."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from support.imported_programs import imported

pytest.importorskip("torch")

PROGRAM = Path(__file__).parent / "programs" / "optimizer_objects.py"
program = imported(PROGRAM)

REFUSED = {
    ("hidden", "zero1"): "Hiding fails with other parameters than the model's",
    ("hidden", "zero3"): "Hiding fails with other parameters than the model's",
    # Flattening 3 rows over 2 ranks is not in DTensor.
    ("line search", "zero1"): "LBFGS fails with parameters that are divided over ranks",
    ("line search", "zero3"): "LBFGS fails with parameters that are divided over ranks",
    # Where ranks hold the same parameters those differ, too.
    ("plateau of its own", "replicas"): "; of the optimizers, lr of SGD 0 (group 0) is ",
    (
        "plateau of its own",
        "zero1",
    ): "after step 8 the ranks' optimizers have different settings: lr of SGD 0 (group 0)",
    (
        "plateau of its own",
        "zero3",
    ): "after step 8 the ranks' optimizers have different settings: lr of SGD 0 (group 0)",
}


@pytest.mark.long
def test_as_one_process(mpirun, tmp_path):
    mpirun(PROGRAM, 2, str(tmp_path / "out"), "gloo")
    ranks = [json.loads((tmp_path / f"out-{rank}.json").read_text()) for rank in range(2)]
    for case in program.MAKE:
        wanted = program.trained(case)
        for mesh, found in ((mesh, each[f"{case}/{mesh}"]) for mesh in program.MESHES for each in ranks):
            if text := REFUSED.get((case, mesh)):
                assert text in found, (case, mesh)
                continue
            assert isinstance(found, dict), (case, mesh, found)
            error = np.abs(np.subtract(found["parameters"], wanted["parameters"])).max()
            assert error <= 1e-10, (case, mesh, error)
            assert (found["lr"], found["shared"]) == (wanted["lr"], wanted["shared"]), (case, mesh)
            # What a script chose stays.
            assert case != "closure" or found["foreach"] == [False], (case, mesh)
