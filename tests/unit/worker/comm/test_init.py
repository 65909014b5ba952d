"""How a process finds its place in a run, and what it says where launcher and MPI do not match."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from hpctrain.common.cluster.launcher import detect
from support.refusals import codes

LAUNCHERS = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS")
TORCHRUN = {
    "TORCHELASTIC_RUN_ID": "none",
    "RANK": "0",
    "WORLD_SIZE": "2",
    "LOCAL_RANK": "0",
    "LOCAL_WORLD_SIZE": "2",
}


def init(code: str = "print(ht.init())", **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {key: value for key, value in os.environ.items() if key not in (*LAUNCHERS, *TORCHRUN)}
    return subprocess.run(
        [sys.executable, "-c", f"import hpctrain as ht; {code}"],
        env={**environment, **variables},
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_a_process_started_by_hand_is_alone_and_says_why():
    result = init()
    assert "rank 0" in result.stdout and "of 1" in result.stdout
    assert len(result.stderr.splitlines()) == 1 and "backend single" in result.stderr


def test_a_second_call_returns_the_same_communicator_and_says_nothing():
    result = init("print(ht.init() is ht.init()); ht.shutdown(); ht.shutdown()")
    assert result.stdout == "True\n" and result.stderr.count("backend") == 1


@pytest.mark.slow
@pytest.mark.parametrize("variable", LAUNCHERS)
def test_a_launcher_that_mpi_does_not_know_is_refused(variable):
    pytest.importorskip("mpi4py.MPI", reason="needs an MPI library", exc_type=(ImportError, RuntimeError))
    result = init(**{variable: "2"})
    assert result.returncode != 0
    assert f"{variable}=2" in result.stderr and "sees 1" in result.stderr
    assert codes(result.stderr) == ["HT-mpi-other-than-launcher"]


@pytest.mark.slow
def test_the_backend_can_come_from_the_launch_with_its_reason():
    asked = "backend single (asked for)"
    assert asked in init(HPCTRAIN_BACKEND="single").stderr
    launched = {"HPCTRAIN_BACKEND": "single", "HPCTRAIN_BACKEND_REASON": "one rank on n1"}
    assert asked.replace("asked for", launched["HPCTRAIN_BACKEND_REASON"]) in init(**launched).stderr
    assert asked in init("ht.init('single')", HPCTRAIN_BACKEND_REASON="x").stderr


@pytest.mark.parametrize("backend", ["mpi", "horovod"])
def test_backends_of_mpi_are_refused_under_torchrun(backend):
    result = init(HPCTRAIN_BACKEND=backend, **TORCHRUN)
    command = f"-np 2 --backend {backend}"
    assert codes(result.stderr) == ["HT-backend-unfit"] and command in result.stderr


@pytest.mark.long
def test_a_group_that_the_script_made_is_refused():
    pytest.importorskip("torch")
    code = (
        "import torch.distributed as dist; "
        "dist.init_process_group('gloo', store=dist.HashStore(), rank=0, world_size=1); ht.init('gloo')"
    )
    result = init(code)
    assert codes(result.stderr) == ["HT-group-made-otherwise"]


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
