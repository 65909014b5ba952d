"""What the Makefile's targets would run."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(("target", "builds"), [("train", False), ("test", True)])
def test_only_the_tests_build_horovod(target: str, builds: bool) -> None:
    result = subprocess.run(
        ["make", "--dry-run", target], cwd=ROOT, check=True, capture_output=True, text=True, timeout=60
    )
    assert ("horovod build" in result.stdout) == builds
    assert ("hpctrain run digits -np 2" in result.stdout) != builds


def test_what_one_tier_leaves_out_the_other_has() -> None:
    tiers = {}
    for target in ("test", "thorough", "test LEAVE_OUT=thorough"):
        printed = subprocess.run(
            ["make", "--dry-run", *target.split()], cwd=ROOT, check=True, capture_output=True, text=True, timeout=60
        ).stdout
        tiers[target] = [line for line in printed.splitlines() if "-m pytest" in line]
    assert len(tiers["test"]) == 3
    desk = "'not (long or thorough)'"
    assert [line.replace(desk, "'long or thorough'") for line in tiers["test"]] == tiers["thorough"]
    everything_once = tiers["test LEAVE_OUT=thorough"]
    assert [line.replace(desk, "'not (thorough)'") for line in tiers["test"]] == everything_once
    # What continuous integration runs.
    assert "\nmake test LEAVE_OUT=thorough\n" in (ROOT / ".ci" / "run").read_text()
