"""The rules of recipes for parameters that are divided over ranks in several ways."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from support.launching import Launch

pytest.importorskip("torch")
PROGRAM = Path(__file__).parent / "programs" / "divided_updates.py"


@pytest.mark.slow
def test_norms_are_of_whole_parameters(mpirun: Launch) -> None:
    differences = json.loads(mpirun(PROGRAM, 4).stdout.splitlines()[-1])
    assert sorted(differences) == ["lamb", "lars", "rmsprop_to_sgd", "sgd"]
    assert all(difference < 1e-13 for difference in differences.values()), differences
