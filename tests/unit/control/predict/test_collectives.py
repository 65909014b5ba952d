"""Predicted all-reduces against SimGrid, which knows nothing of hpctrain but links, routes and messages."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[4]
PROGRAM = ROOT / "benchmarks" / "collectives.py"
SYSTEM_PYTHON = "/usr/bin/python3"


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Those of generated fat trees; real listings are not in every clone."""
    found = Path(SYSTEM_PYTHON).exists() and subprocess.run(
        [SYSTEM_PYTHON, "-c", "import simgrid"], capture_output=True, check=False
    )
    if not found or found.returncode:
        pytest.skip(f"{SYSTEM_PYTHON} has no simgrid: apt install python3-simgrid")
    nowhere = tmp_path_factory.mktemp("none") / "missing"
    command = [sys.executable, str(PROGRAM), "--small", "--json", "--fabrics", str(nowhere)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    said: list[dict[str, Any]] = json.loads(done.stdout)
    return said


@pytest.mark.thorough
def test_times_on_tapered_trees_are_within_a_tenth(cases: list[dict[str, Any]]) -> None:
    assert {case["collective"] for case in cases} == {"ring", "halving-doubling", "hierarchical", "tree"}
    for case in cases:
        assert case["predicted"] == pytest.approx(case["simulated"], rel=0.1), case


@pytest.mark.long
@pytest.mark.slow
def test_rings_and_overlapping_steps_are_exact(cases: list[dict[str, Any]]) -> None:
    for case in cases:
        if case["collective"] in ("ring", "halving-doubling"):
            assert case["predicted"] == pytest.approx(case["simulated"], rel=1e-4), case


@pytest.mark.slow
def test_orders_are_ranked_as_simgrid_ranks_them(cases: list[dict[str, Any]]) -> None:
    assert all(case["ranked_alike"] for case in cases)
    assert max(max(case["simulated"]) / min(case["simulated"]) for case in cases) > 2, "orders that differ in nothing"
