"""What a job has used of what it asked for, by its ranks' own records, and what to ask for next time."""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Iterable

from hpctrain.common.errors import HpctrainError
from hpctrain.common.run.directory import RunDirectory
from hpctrain.common.run.events import EventsFile
from hpctrain.common.run.events.kinds import StartEvent
from hpctrain.common.run.records import RankRecord, read_records
from hpctrain.control.schedulers.slurm.queue import job_states

# For what the next run may need beside what this one has used.
_MARGIN = 1.25
# Of the processes that start the ranks, and the batch script's.
_LAUNCHER_BYTES = 500 * 10**6
# A process of a rank that has more is a worker, whose memory is not the rank's.
_WORKER_BYTES = 100 * 2**20


def used_of_asked(run: RunDirectory, end_seconds: int) -> str:
    """A line for a run that this job has brought to its end; empty where nothing is known.

    Args:
        end_seconds: how long before its limit a job is told of it.
    """
    try:
        (job,) = job_states([os.environ["SLURM_JOB_ID"]])
        begun_here = len(EventsFile(run.events).few(StartEvent)) == 1
    except (HpctrainError, ValueError):
        return ""
    cpus = int(os.environ.get("SLURM_CPUS_ON_NODE", "0"))
    per_node, per_cpu = (int(os.environ.get(f"SLURM_MEM_PER_{name}", "0")) for name in ("NODE", "CPU"))
    records = read_records(run).values()
    used, advice = [], []
    if job.limit_seconds:
        used.append(f"{_minutes(job.seconds)} of {_minutes(job.limit_seconds)} min")
        if begun_here:
            advice.append(f"--time {_minutes(job.seconds * _MARGIN + end_seconds)}")
    if memory := most_memory(records):
        host, most = memory
        asked = (per_node or per_cpu * cpus) * 2**20
        used.append(f"{_gigabytes(most)}{f' of {_gigabytes(asked)}' if asked else ''} GB in the ranks on {host}")
        if asked and not any(record.worker_bytes > _WORKER_BYTES for record in records):
            advice.append(f"--sbatch mem={math.ceil((most * _MARGIN + _LAUNCHER_BYTES) / 2**30)}G")
    if share := busy(records, cpus * int(os.environ.get("SLURM_JOB_NUM_NODES", "1"))):
        used.append(f"{share:.0%} of the CPUs' time")
    if not used:
        return ""
    again = f"; next time: hpctrain submit … {' '.join(advice)}" if advice else ""
    return f"job {job.id} used {', '.join(used)}{again}"


def most_memory(records: Iterable[RankRecord]) -> tuple[str, int] | None:
    """The host whose ranks together had the most memory by their own peaks, and how much in bytes."""
    peaks: Counter[str] = Counter()
    for record in records:
        peaks[record.host] += record.peak_bytes
    most = peaks.most_common(1)
    return most[0] if most and most[0][1] else None


def busy(records: Iterable[RankRecord], cpus: int) -> float | None:
    """The part of the CPUs' time that ranks and their workers used, while the ranks were there."""
    done = [record for record in records if record.ended]
    seconds = max((record.ended - record.started for record in done), default=0.0)
    return sum(record.cpu_seconds for record in done) / (seconds * cpus) if seconds > 0 and cpus else None


def _minutes(seconds: float) -> int:
    return math.ceil(seconds / 60)


def _gigabytes(size: int) -> str:
    return f"{size / 1e9:.1f}"
