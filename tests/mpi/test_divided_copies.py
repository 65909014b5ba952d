"""Copies of a divided model are whole, and hold what the model holds by then."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.launching import Launch

pytest.importorskip("torch")

PROGRAM = Path(__file__).parent / "programs" / "divided_copies.py"


@pytest.mark.slow
def test_they_are_those_of_one_process(mpirun: Launch) -> None:
    mpirun(PROGRAM, 2)
