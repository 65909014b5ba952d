"""How a process finds its place in a run, and what it says where launcher and MPI do not match."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from hpctrain.common.cluster.launcher import detect
from hpctrain.worker.comm import connecting
from support.refusals import codes, refused

LAUNCHERS = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS")
TORCHRUN = {
    "TORCHELASTIC_RUN_ID": "none",
    "RANK": "0",
    "WORLD_SIZE": "2",
    "LOCAL_RANK": "0",
    "LOCAL_WORLD_SIZE": "2",
}


def init(code: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {key: value for key, value in os.environ.items() if key not in (*LAUNCHERS, *TORCHRUN)}
    return subprocess.run(
        [sys.executable, "-c", f"import hpctrain as ht; {code}"],
        env={**environment, **variables},
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_a_process_started_by_hand_is_alone_says_so_once_and_leaves_as_often_as_it_is_asked():
    result = init("print(ht.init(), ht.init() is ht.init()); ht.shutdown(); ht.shutdown()")
    assert "rank 0" in result.stdout and "of 1" in result.stdout and "True" in result.stdout
    assert len(result.stderr.splitlines()) == 1 and "backend single" in result.stderr


@pytest.mark.slow
def test_a_launcher_that_mpi_does_not_know_is_refused():
    pytest.importorskip("mpi4py.MPI", reason="needs an MPI library", exc_type=(ImportError, RuntimeError))
    result = init("ht.init()", PMI_SIZE="2")
    assert result.returncode != 0
    assert "PMI_SIZE=2" in result.stderr and "sees 1" in result.stderr
    assert codes(result.stderr) == ["HT-mpi-other-than-launcher"]


def test_the_reason_of_a_backend_is_the_launchers_where_it_chose_that_one(monkeypatch):
    monkeypatch.setenv("HPCTRAIN_BACKEND_REASON", "one rank on n1")
    monkeypatch.delenv("HPCTRAIN_BACKEND", raising=False)
    assert connecting._reason("single") == "asked for"
    monkeypatch.setenv("HPCTRAIN_BACKEND", "single")
    assert connecting._reason("single") == "one rank on n1"
    monkeypatch.delenv("HPCTRAIN_BACKEND_REASON")
    assert connecting._reason("single") == "asked for"


@pytest.mark.parametrize("backend", ["mpi", "horovod"])
def test_backends_of_mpi_are_refused_under_torchrun(backend):
    with refused("HT-backend-unfit", backend=backend, ranks=2) as failure:
        connecting.connect(backend, detect(TORCHRUN))
    assert f"-np 2 --backend {backend}" in failure.value.hint


def test_a_group_that_the_script_made_is_refused(monkeypatch):
    pytest.importorskip("torch")
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: True)
    with refused("HT-group-made-otherwise"):
        connecting.connect("gloo", detect(TORCHRUN))


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, None),
        ({"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "3"}, (3, 4)),
        ({"PMI_SIZE": "2", "PMI_RANK": "1"}, (1, 2)),
        ({"SLURM_STEP_NUM_TASKS": "8", "SLURM_PROCID": "5"}, (5, 8)),
        # mpirun inside a Slurm job: what mpirun says goes first
        ({"SLURM_NTASKS": "8", "SLURM_PROCID": "0", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "1"}, (1, 2)),
        ({"PMI_SIZE": "many"}, None),
        # torchrun on the nodes of a Slurm step
        ({"SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1", **TORCHRUN, "RANK": "1"}, (1, 2)),
        # what scripts set that start no ranks
        ({"RANK": "1", "WORLD_SIZE": "2"}, None),
    ],
)
def test_the_launcher_is_read_from_its_variables(variables, expected):
    launcher = detect(variables)
    assert (launcher and (launcher.rank, launcher.size)) == expected
    assert (launcher is not None and launcher.name == "torchrun") == ("TORCHELASTIC_RUN_ID" in variables)
