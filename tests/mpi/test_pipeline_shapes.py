"""A pipeline whose batches change their shape, and whose layers are frozen and unfrozen, is one process."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from support.refusals import check

pytest.importorskip("torch")

PROGRAM = Path(__file__).parent / "programs" / "pipeline_shapes.py"
ALL = "gpipe,1f1b,interleaved_1f1b,looped_bfs,interleaved_zero_bubble,zbv"


@pytest.mark.parametrize(
    ("ranks", "backends", "schedules"),
    [
        (2, "mpi", "1f1b,zbv"),
        pytest.param(2, "mpi,gloo", ALL, marks=pytest.mark.thorough),
        pytest.param(4, "gloo", "1f1b,zbv", marks=pytest.mark.thorough),
    ],
)
@pytest.mark.long
def test_batches_of_any_shape_give_the_numbers_of_one_process(mpirun, tmp_path, ranks, backends, schedules):
    mpirun(PROGRAM, ranks, backends, str(tmp_path / "out"), schedules, timeout=600, HPCTRAIN_TIMEOUT="120")
    for backend in backends.split(","):
        for rank in range(ranks):
            found = json.loads((tmp_path / f"out-{backend}-{rank}.json").read_text())
            refused = found.pop("refused", {})
            assert len(found) == 9 * len(schedules.split(","))
            assert {name: error for name, error in found.items() if not error < 1e-10} == {}
            if ranks == 2:
                check(refused["different"], "HT-pipeline-different-batches")
                batches = refused["different"]["values"]["batches"]
                assert all(batches.count(shape) == 1 for shape in ("(8, 5)", "(8, 6)")), batches
                check(refused["flat"], "HT-pipeline-different-samples", samples=8, targets=40)
                check(refused["none"], "HT-pipeline-different-samples", samples=0)
