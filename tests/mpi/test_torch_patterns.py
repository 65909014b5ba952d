"""However a script draws and computes its batches: the numbers of one process; on a mesh perhaps a refusal before."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from support.refused_patterns import REFUSED_ON_A_MESH, REFUSED_WITHOUT_UNITS

pytest.importorskip("torch")

PROGRAM = Path(__file__).parent / "programs" / "torch_patterns.py"
DIVISIONS = ("even", "uneven", "small")


@pytest.mark.parametrize(
    ("ranks", "backends"),
    [
        (3, ("mpi",)),
        pytest.param(2, ("horovod",), marks=pytest.mark.thorough),
        pytest.param(2, ("mpi", "gloo"), marks=pytest.mark.thorough),
    ],
)
@pytest.mark.long
def test_each_pattern_equals_one_process(mpirun, tmp_path, ranks, backends):
    # One start of the ranks serves every pattern, and a wait that does not end ends the test soon.
    mpirun(PROGRAM, ranks, ",".join(backends), str(tmp_path / "out"), timeout=600, HPCTRAIN_TIMEOUT="120")
    for backend in backends:
        results = [json.loads((tmp_path / f"out-{backend}-{rank}.json").read_text()) for rank in range(ranks)]
        assert len(results[0]) > 50
        for name in results[0]:
            for division in DIVISIONS:
                _check(f"{name}, {division}, {backend}", [each[name][division] for each in results])
                assert not results[0][name][division]["refused"], name


@pytest.mark.parametrize(
    ("ranks", "places", "refused"),
    [
        (3, ("mpi@dp_shard=-1+units",), REFUSED_ON_A_MESH),
        pytest.param(2, ("mpi@dp_shard=-1+units",), REFUSED_ON_A_MESH, marks=pytest.mark.thorough),
        pytest.param(2, ("gloo@dp_shard=-1",), REFUSED_WITHOUT_UNITS, marks=pytest.mark.thorough),
        pytest.param(4, ("gloo@dp_shard=2;dp_replicate=2+units",), REFUSED_ON_A_MESH, marks=pytest.mark.thorough),
    ],
)
@pytest.mark.long
def test_each_pattern_on_a_mesh_equals_one_process_or_is_refused(mpirun, tmp_path, ranks, places, refused):
    mpirun(PROGRAM, ranks, ",".join(places), str(tmp_path / "out"), timeout=600, HPCTRAIN_TIMEOUT="120")
    for place in places:
        results = [json.loads((tmp_path / f"out-{place}-{rank}.json").read_text()) for rank in range(ranks)]
        assert len(results[0]) > 50
        for name in results[0]:
            _check(f"{name}, {place}", [each[name]["uneven"] for each in results])
        assert {name for name in results[0] if results[0][name]["uneven"]["refused"]} == refused


def _check(where, ranks):
    for rank in ranks:
        assert rank["error"] < 1e-10, where
        assert rank["refused"] or rank["updates"] == rank["expected"] > 0, where
