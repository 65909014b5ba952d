"""Training with the largest gradients alone between nodes does what the method says, in both frameworks."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from support.imported_programs import imported

PROGRAM = Path(__file__).parent / "programs" / "top_k.py"


@pytest.mark.parametrize("framework", ["torch", "keras"])
@pytest.mark.long
def test_parameters_are_those_of_the_method_by_hand(framework, mpirun, tmp_path):
    pytest.importorskip(framework)
    mpirun(PROGRAM, 3, framework, str(tmp_path / "out"))
    compare(imported(PROGRAM).reference(framework), tmp_path)


@pytest.mark.long
def test_nothing_is_lost_of_a_parameter_that_only_some_steps_use(mpirun, tmp_path):
    pytest.importorskip("torch")
    mpirun(PROGRAM, 3, "now_and_then", str(tmp_path / "out"))
    compare(imported(PROGRAM).reference_now_and_then(), tmp_path)


def compare(wanted: list[np.ndarray], tmp_path: Path) -> None:
    ranks = [np.load(tmp_path / f"out-{rank}.npz") for rank in range(3)]
    for number, parameter in enumerate(wanted):
        found = [rank[f"arr_{number}"] for rank in ranks]
        np.testing.assert_allclose(found[0], parameter, rtol=1e-10, atol=1e-12)
        assert all(each.tobytes() == found[0].tobytes() for each in found)
