"""Streams and samplers of the script's own: the batches and numbers of one process, or a refusal."""

from __future__ import annotations

import json
import os
from importlib.util import find_spec
from pathlib import Path

import pytest

from support.pages import ROOT

PROGRAMS = Path(__file__).parent / "programs"
# `make test LEAVE_OUT=thorough` puts them beside the environment.
_BESIDE = ROOT / ".frameworks" / "streams"


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
    mpirun(PROGRAMS / "streams.py", ranks, backend, str(tmp_path / "out"), timeout=300)
    for rank in range(ranks):
        found = json.loads((tmp_path / f"out-{rank}.json").read_text())
        assert len(found) > 7 and not any(found.values()), found


@pytest.mark.parametrize(
    "ranks", [pytest.param(3, marks=pytest.mark.long), *(pytest.param(n, marks=pytest.mark.thorough) for n in (1, 2))]
)
def test_datasets_and_torchdata_give_the_batches_of_one_process(mpirun, tmp_path, ranks):
    pytest.importorskip("torch")
    if not _BESIDE.exists() and not all(map(find_spec, ("datasets", "torchdata"))):
        pytest.skip("no datasets and torchdata: make .frameworks/installed.stamp")
    path = os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), str(_BESIDE))))
    variables = {"PYTHONPATH": path, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "hub"), "TMPDIR": str(tmp_path)}
    mpirun(PROGRAMS / "hub_streams.py", ranks, "mpi", str(tmp_path / "out"), timeout=300, **variables)
    for rank in range(ranks):
        found = json.loads((tmp_path / f"out-{rank}.json").read_text())
        assert len(found) > 3 and not any(found.values()), found
