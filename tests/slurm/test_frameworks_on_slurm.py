"""Scripts of others in a real Slurm job of two nodes, whose variables their frameworks would read."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.comers import cells
from support.slurm.local_slurm import LocalSlurm


@pytest.mark.thorough
@pytest.mark.parametrize("launcher", ["mpirun", "srun-pmix"])
def test_losses_on_two_nodes_are_those_of_one_process(slurm: LocalSlurm, tmp_path: Path, launcher: str) -> None:
    cells.require("lightning_fit")
    words = ["run", "lightning_fit.py", "--backend", "mpi", "--launcher", launcher]
    cells.execute(words, cells.in_slurm(slurm, "-N2", "-n2"), tmp_path)


@pytest.mark.slow
def test_losses_of_ranks_without_mpi_are_those_of_one_process(slurm: LocalSlurm, tmp_path: Path) -> None:
    cells.require("ddp")
    words = ["run", "ddp.py", "--backend", "gloo", "--launcher", "srun-none", "--env", "MASTER_ADDR=127.0.0.1"]
    cells.execute(words, cells.in_slurm(slurm, "-N2", "-n2"), tmp_path)
