"""Optimizers that hold others, lists of their own or a state give the numbers of one process, or are refused."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from support.imported_programs import imported
from support.refusals import check

pytest.importorskip("torch")

PROGRAM = Path(__file__).parent / "programs" / "optimizer_objects.py"
program = imported(PROGRAM)

OWN_PLATEAU = "plateau of its own"
REFUSED = {
    (OWN_PLATEAU, "replicas"): ("HT-parameters-differ", {}),
    (OWN_PLATEAU, "zero1"): ("HT-parameters-differ", {"step": 8, "name": "settings of the optimizers"}),
    (OWN_PLATEAU, "zero3"): ("HT-parameters-differ", {"step": 8, "name": "settings of the optimizers"}),
}


@pytest.mark.long
def test_as_one_process(mpirun, tmp_path):
    mpirun(PROGRAM, 2, str(tmp_path / "out"), "gloo")
    ranks = [json.loads((tmp_path / f"out-{rank}.json").read_text()) for rank in range(2)]
    for case in program.MAKE:
        wanted = program.trained(case)
        for mesh, found in ((mesh, each[f"{case}/{mesh}"]) for mesh in program.MESHES for each in ranks):
            if refused := REFUSED.get((case, mesh)):
                code, values = refused
                check(found, code, **values)
                continue
            assert "parameters" in found, (case, mesh, found)
            error = np.abs(np.subtract(found["parameters"], wanted["parameters"])).max()
            assert error <= 1e-10, (case, mesh, error)
            assert (found["lr"], found["shared"]) == (wanted["lr"], wanted["shared"]), (case, mesh)
            # What a script chose stays.
            assert case != "closure" or found["foreach"] == [False], (case, mesh)
