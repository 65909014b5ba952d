"""What the launcher says about this process, read from the environment that it set."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

# What can start the ranks of a run. `auto` is the first of the others that proves to work where the run starts.
LAUNCHERS = ("auto", "mpirun", "srun-pmix", "srun-pmi2")


@dataclass(frozen=True, kw_only=True)
class LauncherClaim:
    """The claim of one launcher: that it started ``size`` ranks, this one being ``rank``."""

    name: str
    variable: str
    rank: int
    size: int


# In this order, because an mpirun inside a Slurm job sets its own variables beside Slurm's.
_KNOWN = (
    ("Open MPI's mpirun", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"),
    ("Hydra (MPICH, Intel MPI) or srun --mpi=pmi2", "PMI_SIZE", "PMI_RANK"),
    # SLURM_NTASKS is a batch script's too, which is no rank.
    ("srun", "SLURM_STEP_NUM_TASKS", "SLURM_PROCID"),
)

# A process without these is nobody's rank.
SIZE_VARIABLES = tuple(size for _, size, _ in _KNOWN)


def detect(environment: Mapping[str, str] = os.environ) -> LauncherClaim | None:
    """The launcher that started this process, or None for a process started by hand."""
    for name, size, rank in _KNOWN:
        if environment.get(size, "").isdigit():
            rank_text = environment.get(rank, "0")
            return LauncherClaim(
                name=name,
                variable=size,
                rank=int(rank_text) if rank_text.isdigit() else 0,
                size=int(environment[size]),
            )
    return None
