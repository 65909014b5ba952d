"""Slurm as a scheduler."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from hpctrain.common.cluster.programs import program_output, run_program
from hpctrain.common.errors import HpctrainError
from hpctrain.common.files.printable import shell_word
from hpctrain.control.schedulers.jobs import JobState
from hpctrain.control.schedulers.profile import ClusterProfile
from hpctrain.control.schedulers.scheduler import Cluster, Order, Say, Scheduler, Submitted
from hpctrain.control.schedulers.slurm.queue import job_states, jobs_of_user
from hpctrain.control.schedulers.submission import run_path

_SECONDS = 30.0
_NOT_BY_ITSELF = (
    "# To look at: sbatch of this file alone ends without a log, because hpctrain submit makes the run directory\n"
    "# with plan and logs, and submits this script too."
)
# sacct marks an unknown number by one of the two largest values of 64 bits.
_UNKNOWN = 2**64 - 2


class Slurm(Scheduler):
    """``sbatch``, ``squeue``, ``sacct`` and ``scancel``. What submits is imported late: ``status`` needs none of it."""

    def cluster(self, profile: ClusterProfile | None, partition: str | None) -> Cluster:
        from hpctrain.control.schedulers.slurm.discover import discover

        return discover(partition) if profile is None else Cluster(profile=profile)

    def describe(self, order: Order, say: Say) -> str:
        from hpctrain.control.schedulers.slurm.sbatch import prepare, require_log_path

        job = prepare(order)
        for line in job.notices:
            say(line)
        directory = run_path(order, job.plan)
        require_log_path(directory)
        first, _, rest = job.render(directory).partition("\n")
        return f"{first}\n{_NOT_BY_ITSELF}\n{rest}"

    def submit(self, order: Order, say: Say) -> Submitted:
        from hpctrain.control.schedulers.slurm.sbatch import prepare, submit_job

        job = prepare(order)
        for line in job.notices:
            say(line)
        directory, number = submit_job(order, job)
        advice = f"submitted as job {number}; see its state: hpctrain status {shell_word(directory.path)}"
        return Submitted(directory=directory.path, jobs=(number,), advice=advice)

    def list(self, jobs: Collection[str] | None, *, user: int, seconds: float) -> Sequence[JobState]:
        return jobs_of_user(user, seconds=seconds) if jobs is None else job_states(sorted(jobs), seconds=seconds)

    def cancel(self, jobs: Sequence[str]) -> None:
        done = run_program("scancel", *jobs, seconds=_SECONDS)
        if done.returncode != 0:
            raise HpctrainError(
                "HT-slurm-command-failed",
                "scancel {jobs} failed: {reason}",
                exit_code=1,
                jobs=" ".join(jobs),
                reason=done.stderr.strip(),
            )

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
