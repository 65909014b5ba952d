"""Slurm as a scheduler."""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from hpctrain.common.cluster.programs import program_output
from hpctrain.common.errors import HpctrainError
from hpctrain.common.run.directory import RunDirectory
from hpctrain.common.run.plan import Plan
from hpctrain.control.schedulers.job_request import SETTINGS, JobSettings
from hpctrain.control.schedulers.job_script import ScriptScheduler
from hpctrain.control.schedulers.jobs import JobState
from hpctrain.control.schedulers.profile import ClusterProfile
from hpctrain.control.schedulers.scheduler import Cluster, Order
from hpctrain.control.schedulers.slurm.queue import job_states, jobs_of_user
from hpctrain.control.schedulers.slurm.sbatch import job_script, require_log_path

# sacct marks an unknown number by one of the two largest values of 64 bits.
_UNKNOWN = 2**64 - 2


class Slurm(ScriptScheduler):
    """``sbatch``, ``squeue``, ``sacct`` and ``scancel``."""

    ends = "scancel"
    terse = ("--parsable",)

    def cluster(self, profile: ClusterProfile | None, partition: str | None) -> Cluster:
        from hpctrain.control.schedulers.slurm.discover import discover

        return discover(partition) if profile is None else Cluster(profile=profile)

    def script(self, order: Order, plan: Plan, directory: Path) -> str:
        start = order.training.start
        if start.container and start.container.runtime == "pyxis" and start.launcher == "mpirun":
            raise HpctrainError(
                "HT-launcher-not-usable-here",
                "pyxis is a plugin of srun: mpirun cannot start its containers",
                "--launcher srun-pmix",
            )
        require_log_path(directory)
        return job_script(
            order.request,
            order.cluster.profile,
            run_directory=directory,
            folder=Path.cwd(),
            virtual_environment=_virtual_environment(),
            no_kill=plan.fault_tolerant,
        )

    def command(self, directory: RunDirectory) -> tuple[str, ...]:
        return ("sbatch", f"--chdir={directory.path}", str(directory.script))

    def files(self, order: Order) -> Mapping[str, str]:
        settings = JobSettings(
            request=order.request,
            verify=order.verify,
            check=order.check or order.request.spare > 0,
            container=order.training.start.container,
        )
        return {SETTINGS: f"{settings.model_dump_json(indent=2, exclude_defaults=True)}\n"}

    def list(self, jobs: Collection[str] | None, *, user: int, seconds: float) -> Sequence[JobState]:
        return jobs_of_user(user, seconds=seconds) if jobs is None else job_states(sorted(jobs), seconds=seconds)

    def joules(self, jobs: Sequence[str], *, seconds: float) -> int | None:
        """See :meth:`Scheduler.joules`. Steps are not counted, because they overlap.

        Where a cluster measures it, it is each whole node's, so that it is a job's own only if the job has its nodes
        alone. Source: https://slurm.schedmd.com/sacct.html (ConsumedEnergyRaw).
        """
        if not jobs:
            return None
        options = ("--allocations", "--noheader", "--parsable2", "--format=ConsumedEnergyRaw")
        printed = program_output("sacct", *options, f"--jobs={','.join(jobs)}", seconds=seconds)
        drawn = [int(line) for line in printed.splitlines() if line.isdecimal()]
        return sum(joules for joules in drawn if joules < _UNKNOWN) or None


def _virtual_environment() -> Path | None:
    """The virtual environment that this hpctrain is installed in; None without one."""
    here = Path(sys.prefix)
    return here if sys.prefix != sys.base_prefix and (here / "bin" / "activate").exists() else None
