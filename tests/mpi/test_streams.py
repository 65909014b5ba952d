"""Streams and samplers of the script's own: the batches and numbers of one process, or a refusal."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parent / "programs" / "streams.py"


@pytest.mark.parametrize(
    ("ranks", "backend"),
    [
        (3, "mpi"),
        pytest.param(2, "gloo", marks=pytest.mark.thorough),
        pytest.param(1, "auto", marks=pytest.mark.thorough),
    ],
)
def test_streams_and_samplers_give_the_batches_of_one_process(mpirun, tmp_path, ranks, backend):
    pytest.importorskip("torch")
    pytest.importorskip("webdataset")
    mpirun(PROGRAM, ranks, backend, str(tmp_path / "out"), timeout=300)
    for rank in range(ranks):
        found = json.loads((tmp_path / f"out-{rank}.json").read_text())
        assert all(found[name] < 1e-12 for name in found if name.startswith("weights")), found
        assert len(found) > 10
