"""The limits of partitions, and the check for requests that Slurm would refuse or let wait for ever."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from hpctrain.common.cluster.programs import program_output
from hpctrain.common.errors import HpctrainError
from hpctrain.control.schedulers.request import JobRequest
from hpctrain.control.schedulers.slurm.nodes import number
from hpctrain.control.schedulers.times import slurm_seconds

_QOS = ("sacctmgr", "--noheader", "--parsable2", "show", "qos", "format=Name,Flags")
# How Slurm prints that there is no limit.
_WITHOUT = frozenset(("", "UNLIMITED", "INFINITE", "NONE", "N/A", "0"))


@dataclass(frozen=True, kw_only=True)
class Limits:
    """The limits of a job in one partition; None without a limit.

    Attributes:
        total: nodes that it has, those that are down among them.
        least, most: how many nodes a job may have.
        time: the longest time limit, as Slurm writes it.
        gpus: the most that a node has; None where Slurm's list of them is not understood.
        cpus: the most that a job can have of a node, in Slurm's CPUs.
        memory: the most that a job can have of a node, in MB.
    """

    partition: str
    total: int | None = None
    least: int | None = None
    most: int | None = None
    time: str | None = None
    gpus: int | None = None
    cpus: int | None = None
    memory: int | None = None


# The flag of a QOS that lifts a limit, by the code of its error; nothing lifts the others.
_LIFTED_BY = {
    "HT-job-more-nodes-than-allowed": "PartitionMaxNodes",
    "HT-job-fewer-nodes-than-allowed": "PartitionMinNodes",
    "HT-job-longer-than-allowed": "PartitionTimeLimit",
}


def read_limits(partition: Mapping[str, str], gpus: int | None = None, cpus: int | None = None) -> Limits:
    """The limits of a partition.

    Args:
        partition: the settings that ``scontrol show partition`` prints of it.
        gpus, cpus: as in :class:`Limits`.
    """
    return Limits(
        partition=partition["PartitionName"],
        total=number(partition.get("TotalNodes", "")),
        least=number(partition.get("MinNodes", "")),
        most=number(partition.get("MaxNodes", "")),
        time=None if partition.get("MaxTime", "") in _WITHOUT else partition["MaxTime"],
        gpus=gpus,
        cpus=cpus,
        memory=number(partition.get("MaxMemPerNode", "")),
    )


def check_limits(request: JobRequest, partitions: Sequence[Limits]) -> list[str]:
    """Refuse a request that no partition of its list allows; warnings where a QOS may lift the limit.

    Where ``EnforcePartLimits`` is NO, Slurm takes such a job, which then waits for ever with the reason
    PartitionTimeLimit, PartitionNodeLimit or PartitionConfig. A QOS with the flag PartitionTimeLimit, PartitionMaxNodes
    or PartitionMinNodes lifts the limit of that name (``man sacctmgr``); nothing lifts the number of nodes that there
    are.

    Args:
        partitions: that it may run in; none where Slurm does not say.

    Raises:
        HpctrainError: a limit, with its value and the partition.
    """
    faults = [list(_faults(request, limits)) for limits in partitions]
    if not faults or not all(faults):
        return []
    lasting = [
        [fault for fault in each if not _may_be_lifted(_LIFTED_BY.get(fault.code), request.qos)] for each in faults
    ]
    fewest = min(range(len(faults)), key=lambda place: (len(lasting[place]), len(faults[place])))
    for fault in lasting[fewest]:
        raise fault
    return [
        f"warning: {fault.message}: it waits for ever unless its QOS has the flag {_LIFTED_BY[fault.code]}"
        for fault in faults[fewest]
    ]


def _faults(request: JobRequest, limits: Limits) -> Iterator[HpctrainError]:
    nodes, name = request.nodes, limits.partition
    if limits.total is not None and nodes > limits.total:
        yield HpctrainError(
            "HT-job-too-many-nodes",
            "--nodes {nodes}: the partition {partition} has {total} nodes",
            f"at most --nodes {limits.total}",
            nodes=nodes,
            partition=name,
            total=limits.total,
        )
    elif limits.most is not None and nodes > limits.most:
        yield HpctrainError(
            "HT-job-more-nodes-than-allowed",
            "--nodes {nodes}: a job in the partition {partition} has at most {most} (MaxNodes)",
            f"at most --nodes {limits.most}, or another --partition",
            nodes=nodes,
            partition=name,
            most=limits.most,
        )
    if limits.least is not None and nodes < limits.least:
        yield HpctrainError(
            "HT-job-fewer-nodes-than-allowed",
            "--nodes {nodes}: a job in the partition {partition} has at least {least} (MinNodes)",
            f"at least --nodes {limits.least}, or another --partition",
            nodes=nodes,
            partition=name,
            least=limits.least,
        )
    if limits.gpus is not None and request.gpus_per_node > limits.gpus:
        yield HpctrainError(
            "HT-job-larger-than-a-node",
            "--gpus-per-node {gpus}: a node of the partition {partition} has at most {most}",
            f"at most --gpus-per-node {limits.gpus}, or another --partition",
            gpus=request.gpus_per_node,
            partition=name,
            most=limits.gpus,
        )
    yield from _node_faults(request, limits)
    # With --time-min Slurm may shorten the job, so its time is not fixed.
    fixed = request.time if "time-min" not in request.sbatch else None
    if limits.time and fixed and _minutes(fixed) > _minutes(limits.time):
        yield HpctrainError(
            "HT-job-longer-than-allowed",
            "--time {time}: the partition {partition} allows {longest} (MaxTime)",
            f"at most --time {limits.time}, or another --partition; --chain N goes on after it",
            time=fixed,
            partition=name,
            longest=limits.time,
        )


def _node_faults(request: JobRequest, limits: Limits) -> Iterator[HpctrainError]:
    cpus = (request.cpus_per_task or 1) * request.tasks_per_node
    if limits.cpus is not None and cpus > limits.cpus:
        yield HpctrainError(
            "HT-job-larger-than-a-node",
            "{tasks} tasks of {cpus} CPUs on a node: a job in the partition {partition} has at most {most} CPUs of one",
            f"at most --cpus-per-task {limits.cpus // request.tasks_per_node or 1}, or fewer --tasks-per-node",
            tasks=request.tasks_per_node,
            cpus=request.cpus_per_task or 1,
            partition=limits.partition,
            most=limits.cpus,
        )
    asked = _megabytes(request, cpus)
    if limits.memory is not None and asked > limits.memory:
        yield HpctrainError(
            "HT-job-larger-than-a-node",
            "{asked:,.0f} MB of a node: a job in the partition {partition} has at most {most:,} MB (MaxMemPerNode)",
            f"at most --sbatch mem={limits.memory}M, or another --partition",
            asked=asked,
            partition=limits.partition,
            most=limits.memory,
        )


def _megabytes(request: JobRequest, cpus: int) -> float:
    """The memory of a node that a request names; 0 for the default, and for all of it."""
    named = {"mem": 1, "mem-per-cpu": cpus, "mem-per-gpu": request.gpus_per_node}
    sizes = [(request.sbatch.get(option), times) for option, times in named.items()]
    for size, times in (*sizes, (request.memory, 1)):
        if found := re.fullmatch(r"([0-9]{1,15})([KMGT]?)B?", size or "", re.IGNORECASE):
            return int(found[1]) * times * {"K": 2**-10, "G": 2**10, "T": 2**20}.get(found[2].upper(), 1)
    return 0


def _minutes(text: str) -> float:
    """Slurm counts whole minutes, rounded up; 0 asks for no limit."""
    seconds = slurm_seconds(text)
    return math.ceil(seconds / 60) if seconds else math.inf


def _may_be_lifted(flag: str | None, qos: str | None) -> bool:
    """Whether the QOS asked for, or the default one, which any may be, may lift a limit; unknown ones may."""
    if flag is None:
        return False
    flags = dict(line.partition("|")[::2] for line in program_output(*_QOS).splitlines())
    if qos is None:
        return any(flag in each.split(",") for each in flags.values())
    return qos not in flags or flag in flags[qos].split(",")
