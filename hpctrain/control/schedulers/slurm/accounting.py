"""The energy of jobs as Slurm's accounting has it."""

from __future__ import annotations

from collections.abc import Sequence

from hpctrain.common.cluster.programs import run_program
from hpctrain.common.errors import HpctrainError

_SECONDS = 10.0
# Slurm marks an unknown number by one of the two largest values of 64 bits.
_UNKNOWN = 2**64 - 2


def consumed_joules(ids: Sequence[str], *, seconds: float = _SECONDS) -> int | None:
    """The joules that the nodes of these jobs drew; steps are not counted, because they overlap.

    Where a cluster measures it, it is each whole node's, so that it is a job's own only if the job has its nodes alone.
    Source: https://slurm.schedmd.com/sacct.html (ConsumedEnergyRaw).

    Args:
        ids: job numbers that :func:`hpctrain.control.schedulers.slurm.queue.is_job_id` accepts.
        seconds: how long Slurm may take to answer.

    Returns:
        None where Slurm does not answer, has no accounting, or has not measured any of them.
    """
    if not ids:
        return None
    arguments = ("--allocations", "--noheader", "--parsable2", "--format=ConsumedEnergyRaw", f"--jobs={','.join(ids)}")
    try:
        done = run_program("sacct", *arguments, seconds=seconds)
    except HpctrainError:
        return None
    if done.returncode != 0:
        return None
    drawn = [int(line) for line in done.stdout.splitlines() if line.isdecimal()]
    return sum(each for each in drawn if each < _UNKNOWN) or None
