"""The environment variables in which a launcher tells this process its rank, and Kubernetes its pod."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from hpctrain.common.settings import POD

TORCHRUN = "torchrun"
SRUN = "srun"
SRUN_NONE = "srun-none"
# The launchers whose ranks have no MPI, and meet at a store of torch.distributed.
WITHOUT_MPI = (TORCHRUN, SRUN_NONE)
# What hpctrain.worker.programs.torchrun calls its meeting, as an option of torchrun.
ONE_ADDRESS = "one-address"

# What can start the ranks of a run by the means of MPI. `auto` is the first of them that is installed where the run
# starts; the launchers without have to be asked for.
MPI_LAUNCHERS = ("mpirun", "srun-pmix", "srun-pmi2")
# What may be asked for, as a pattern: srun also with any other plugin that `srun --mpi=list` names (srun-cray_shasta).
LAUNCHER = r"auto|mpirun|torchrun|srun-[a-z0-9_]+"


@dataclass(frozen=True, kw_only=True)
class LauncherClaim:
    """A launcher's claim that it started ``size`` ranks, and that this one is ``rank``."""

    name: str
    variable: str
    rank: int
    size: int


# Set by torchrun, and by ranks of SRUN_NONE; RANK and WORLD_SIZE are also set by scripts that start no ranks.
TORCHRUN_MARK = "TORCHELASTIC_RUN_ID"
# The mark's value where hpctrain sets torchrun's variables, for libraries that look for them.
AS_TORCHRUN = "hpctrain"

# In this order, because an mpirun inside a Slurm job sets its own variables beside Slurm's.
_KNOWN = (
    ("Open MPI's mpirun", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"),
    ("Hydra (MPICH, Intel MPI) or srun --mpi=pmi2", "PMI_SIZE", "PMI_RANK"),
    # Not SLURM_NTASKS, which a batch script has too, and that is no rank.
    (SRUN, "SLURM_STEP_NUM_TASKS", "SLURM_PROCID"),
)

# The number of a pod of an Indexed Job.
_POD_INDEX = "JOB_COMPLETION_INDEX"
# A process without these variables is not a rank.
SIZE_VARIABLES = (*(size for _, size, _ in _KNOWN), TORCHRUN_MARK)


def detect(environment: Mapping[str, str] = os.environ) -> LauncherClaim | None:
    """The launcher that started this process; None for a process started by hand."""
    # An srun or mpirun that starts torchrun on each host leaves its own variables to torchrun's ranks.
    mark = environment.get(TORCHRUN_MARK)
    torchrun = ((TORCHRUN, "WORLD_SIZE", "RANK"),) if mark and mark != AS_TORCHRUN else ()
    for name, size, rank in (*torchrun, *_KNOWN):
        if environment.get(size, "").isdigit():
            rank_text = environment.get(rank, "0")
            return LauncherClaim(
                name=name,
                variable=size,
                rank=int(rank_text) if rank_text.isdigit() else 0,
                size=int(environment[size]),
            )
    return None


def in_pod(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether this process runs in a pod that was made for a run; a pod of somebody else's is any machine."""
    return POD.read(environment) is not None


def pod_index(environment: Mapping[str, str] = os.environ) -> int | None:
    """The number of this pod among those of a run's Indexed Job; None elsewhere.

    Source: https://kubernetes.io/docs/concepts/workloads/controllers/job/#completion-mode.
    """
    index = environment.get(_POD_INDEX, "")
    return int(index) if in_pod(environment) and index.isascii() and index.isdigit() else None
