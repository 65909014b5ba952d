"""A script of Lightning in a real Slurm job of two nodes, whose variables Lightning would read."""

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
