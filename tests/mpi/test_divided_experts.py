"""A divided network of which a rank's samples use only some parts is that of one process."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from support.refusals import check

pytest.importorskip("torch")
PROGRAM = Path(__file__).parent / "programs" / "divided_experts.py"
# bfloat16 has 8 bits.
TOLERANCES = {"rounded_and_accumulated": 0.1}
SHARDS = [
    "equal_experts",
    "unequal_experts",
    "accumulated",
    "gradients_asked_for",
    "rounded_and_accumulated",
    "experts_that_are_gathered_alone",
]


@pytest.mark.parametrize(
    ("ranks", "backend", "names"),
    [
        (2, "gloo", [*SHARDS, "experts_that_are_gathered_alone"]),
        pytest.param(3, "mpi", SHARDS, marks=pytest.mark.thorough),
        pytest.param(4, "gloo", ["unequal_experts", "replicated_shards", "in_stages"], marks=pytest.mark.thorough),
    ],
)
@pytest.mark.slow
def test_ranks_use_different_experts(mpirun, tmp_path, ranks, backend, names):
    mpirun(PROGRAM, ranks, backend, str(tmp_path / "out"), *names)
    for rank in range(ranks):
        found = json.loads((tmp_path / f"out-{rank}.json").read_text())
        if (refused := found.pop("experts_that_are_gathered_alone", None)) is not None:
            check(refused, "HT-plan-parts-differ")
        assert {name: each for name, each in found.items() if not each < TOLERANCES.get(name, 1e-10)} == {}
