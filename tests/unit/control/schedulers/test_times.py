"""Slurm's durations."""

from __future__ import annotations

import pytest

from hpctrain.control.schedulers.jobs import slurm_seconds


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("3", 180), ("1:30", 90), ("2:00:01", 7201), ("1-2", 93600), ("1-2:3", 93780), ("1-2:3:4", 93784), ("0", 0)],
)
def test_forms_of_the_manual_of_sbatch(text: str, seconds: int) -> None:
    assert slurm_seconds(text) == seconds


@pytest.mark.parametrize("text", ["", "UNLIMITED", "INVALID", "1:2:3:4", "1-", "-1", "1.5", "\u0661", "1:2 "])
def test_any_other_text(text: str) -> None:
    assert slurm_seconds(text) is None
