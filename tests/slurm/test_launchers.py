"""How ranks are started in a real Slurm job: by which launcher, on which hosts, with which variables."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from support.launching import AS_ROOT
from support.slurm.local_slurm import LocalSlurm

HPCTRAIN = str(Path(sys.executable).parent / "hpctrain")
ODD = "a,b;c=\nd \"e\" $x `id` 'f'  g\\h"
# The interleaved tree makes neighbours of n1 and n3, whatever the order in which hosts are named.
WHERE = """\
import json, os
import hpctrain as ht
comm = ht.init()
from mpi4py import MPI
ranks = MPI.COMM_WORLD.gather((comm.rank, comm.size, os.environ["SLURMD_NODENAME"], os.environ["ODD"]))
if comm.rank == 0:
    print("WHERE " + json.dumps(ranks), flush=True)
"""


def in_job(
    slurm: LocalSlurm, folder: Path, *command: str, options: tuple[str, ...] = ("-N3", "-n6"), **more: str
) -> str:
    (folder / "where.py").write_text(WHERE)
    return slurm.run(
        *("salloc", *options, f"--chdir={folder}", *command), check=False, timeout=180, **AS_ROOT, ODD=ODD, **more
    )


def run(*arguments: str) -> tuple[str, ...]:
    return (HPCTRAIN, "run", "where.py", "--env", "ODD", "--run-dir", "run", *arguments)


def ranks(output: str) -> list[tuple[int, int, str, str]]:
    said = [line.removeprefix("WHERE ") for line in output.splitlines() if line.startswith("WHERE ")]
    assert len(said) == 1, output
    return [tuple(rank) for rank in json.loads(said[0])]


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["mpirun", "srun-pmix", "srun-pmix_v4"])
def test_ranks_are_where_the_plan_has_them(slurm: LocalSlurm, tmp_path: Path, launcher: str) -> None:
    options = ("--launcher", launcher, "-H", "n[1-3],n4:2")
    found = ranks(in_job(slurm, tmp_path, *run(*options), options=("-N4", "-n8")))
    plan = json.loads((tmp_path / "run" / "plan.json").read_text())
    placed = [host["host"] for host in plan["hosts"] for _ in range(host["slots"])]
    assert found == [(rank, 5, host, ODD) for rank, host in enumerate(placed)]
    # As named, the ring would cross at every step.
    assert placed in (["n1", "n3", "n2", "n4", "n4"], ["n1", "n3", "n4", "n4", "n2"])


@pytest.mark.slow
def test_a_job_inside_a_step(slurm: LocalSlurm, tmp_path: Path) -> None:
    # The step has all processors of its node; steps beside it would wait for its end.
    step = ("srun", "--nodes=1", "--ntasks=1", "--cpus-per-task=2", "--mpi=none")
    output = in_job(slurm, tmp_path, *step, *run("--launcher", "mpirun", "-np", "2"), options=("-N2", "-n2", "-c2"))
    assert [rank[:2] for rank in ranks(output)] == [(0, 2), (1, 2)]


@pytest.mark.slow
def test_pmi2_starts_ranks_that_do_not_see_each_other(slurm: LocalSlurm, tmp_path: Path) -> None:
    # Open MPI 5 speaks PMIx alone: every rank would train by itself.
    output = in_job(slurm, tmp_path, *run("--launcher", "srun-pmi2", "-np", "2"), options=("-N2", "-n2"))
    assert "so every rank would train alone" in output
    assert "WHERE" not in output


@pytest.mark.long
def test_one_process_in_a_batch_job(slurm: LocalSlurm, tmp_path: Path) -> None:
    (tmp_path / "alone.py").write_text("import hpctrain as ht; print('size', ht.init().size, flush=True)")
    script = tmp_path / "job"
    lines = [
        f"{HPCTRAIN} run alone.py --backend single -np 1 -H $(hostname) --run-dir run",
        f"{sys.executable} alone.py",
    ]
    script.write_text("\n".join(["#!/bin/bash", *lines]))
    slurm.run("sbatch", "--wait", "-N1", "-n2", f"--chdir={tmp_path}", "--output=log", str(script), **AS_ROOT)
    assert (tmp_path / "log").read_text().count("size 1\n") == 2
