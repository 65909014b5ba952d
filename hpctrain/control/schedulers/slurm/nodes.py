"""The nodes of a cluster by what a job can have of each, from what Slurm prints of them."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

NODES = ("sinfo", "--exact", "--noheader", "--format=%R|%T|%D|%c|%X|%Y|%m|%G")
DETAILS = ("scontrol", "--oneliner", "show", "node")

# Nodes in these states run no jobs until somebody repairs them.
_BROKEN = ("down", "drain", "fail", "error", "inval", "unk", "future", "maint", "perfctrs", "no_respond", "reboot")

# Nodes of a cloud that have not started yet have what slurm.conf says, where no count means 1. Source: _get_gres_cnt
# of Slurm's src/interfaces/gres.c.
_TYPE = r"(?!no_consume)(?P<type>[A-Za-z][\w.-]*|[\w.-]+(?=:))"
_GPUS = re.compile(rf"gpu(?::{_TYPE})?(?::no_consume)?(?::(?P<count>[0-9]{{1,4}}))?", re.ASCII)
# A type of MIG: 1g.10gb, a100_1g.5gb, 1g.10gb.me.
_SLICE = re.compile(r"(?:^|_)[1-9]g\.[0-9]+gb")

_NUMBER = re.compile(r"[0-9]{1,9}")

Keys = dict[str, str]


@dataclass(frozen=True, kw_only=True)
class NodeKind:
    """Equal nodes.

    Attributes:
        cores: those that a job can have, ``of`` the cores that there are.
        memory: in MB.
        threads: of a core, as far as Slurm counts them.
        gpu_type: empty where the site names none.
    """

    cores: int
    of: int
    memory: int
    threads: int = 1
    gpus: int = 0
    gpu_type: str = ""
    other_gpus: str = ""

    def __str__(self) -> str:
        gpus = f"{self.gpus} GPUs{f' {self.gpu_type}' if self.gpu_type else ''}" if self.gpus else "no GPUs"
        others = f" and {self.other_gpus}" if self.other_gpus else ""
        threads = f" of {self.threads} hardware threads" if self.threads > 1 else ""
        cores = f"{self.cores} of {self.of}" if self.cores < self.of else self.cores
        return f"{gpus}{others}, {cores} cores{threads}, {self.memory} MB"


@dataclass(frozen=True, kw_only=True)
class Nodes:
    """The nodes of one partition: how many of each kind can run jobs, and how many cannot."""

    usable: Counter[NodeKind]
    broken: int

    @property
    def kind(self) -> NodeKind:
        """The most frequent kind of node."""
        return self.usable.most_common(1)[0][0]


def read_nodes(text: str, partitions: Mapping[str, Keys] = {}, details: str = "") -> dict[str, Nodes]:
    """The nodes of each partition.

    Args:
        text: the output of :data:`NODES`.
        partitions: the settings of each partition, which may keep CPUs from jobs.
        details: the output of :data:`DETAILS`.
    """
    nodes: dict[str, Nodes] = {}
    for line in _lines(text, partitions, details):
        here = nodes.setdefault(line.partition, Nodes(usable=Counter(), broken=0))
        # '*' after a state: the node does not answer.
        if line.state.lower().startswith(_BROKEN) or "*" in line.state:
            nodes[line.partition] = Nodes(usable=here.usable, broken=here.broken + line.count)
        elif line.cpus and line.cores:
            # Slurm's CPUs are cores or hardware threads, as the site configures it.
            threads = max(1, line.cpus // line.cores)
            cores = max(1, min(line.available // threads, line.cores))
            kind = NodeKind(cores=cores, of=line.cores, threads=threads, memory=line.memory, **_gpus(line.gres))
            here.usable[kind] += line.count
    return nodes


def most_cpus(text: str, partitions: Mapping[str, Keys], details: str) -> dict[str, int]:
    """The most CPUs that a job can have on a node of each partition; the arguments are those of :func:`read_nodes`."""
    most: dict[str, int] = {}
    for line in _lines(text, partitions, details):
        most[line.partition] = max(most.get(line.partition, 0), line.available)
    return most


@dataclass(frozen=True, kw_only=True)
class _Line:
    """A line of sinfo: ``cpus`` that Slurm counts on a node, those ``available`` to a job, and its ``cores``."""

    partition: str
    state: str
    count: int
    cpus: int
    available: int
    cores: int
    memory: int
    gres: str


def _lines(text: str, partitions: Mapping[str, Keys], details: str) -> Iterator[_Line]:
    fields = [line.split("|", 7) for line in text.splitlines()]
    numbered = [each for each in fields if len(each) == 8 and all(_NUMBER.fullmatch(field) for field in each[2:7])]
    sizes: dict[str, set[int]] = {}
    for each in numbered:
        sizes.setdefault(each[0], set()).add(int(each[3]))
    effective = _effective_cpus(details)
    for name, state, *numbers, gres in numbered:
        count, cpus, sockets, cores, memory = map(int, numbers)
        partition = partitions.get(name, {})
        of_sockets = number(partition.get("MaxCPUsPerSocket", ""))
        limits = (
            effective.get((name, cpus)) or (_equal_share(partition) if len(sizes[name]) == 1 else None),
            number(partition.get("MaxCPUsPerNode", "")),
            of_sockets and of_sockets * sockets,
        )
        yield _Line(
            partition=name,
            state=state,
            count=count,
            cpus=cpus,
            available=min([cpus, *(limit for limit in limits if limit)]),
            cores=sockets * cores,
            memory=memory,
            gres=gres,
        )


def _effective_cpus(details: str) -> dict[tuple[str, int], int]:
    """The CPUs that jobs can have of a node, by its partitions and all CPUs that it has: those of ``CoreSpecCount``
    are the system's. Slurm before 22.05 prints no ``CPUEfctv``.
    """
    found: dict[tuple[str, int], int] = {}
    for keys in read_keys(details):
        total = number(keys.get("CPUTot", ""))
        reserved = (number(keys.get("CoreSpecCount", "")) or 0) * (number(keys.get("ThreadsPerCore", "")) or 1)
        jobs = number(keys.get("CPUEfctv", "")) or (total or 0) - reserved
        for partition in keys.get("Partitions", "").split(",") if total and jobs > 0 else ():
            found[partition, total or 0] = min(found.get((partition, total or 0), jobs), jobs)
    return found


def _equal_share(partition: Keys) -> int | None:
    """The CPUs of each of a partition's equal nodes, from the sums that jobs can have: ``TRES=cpu=208,node=2``."""
    sums = dict(each.partition("=")[::2] for each in partition.get("TRES", "").split(","))
    cpus, nodes = number(sums.get("cpu", "")), number(sums.get("node", ""))
    return cpus // nodes if cpus and nodes else None


def read_keys(text: str) -> list[Keys]:
    """The settings of each partition or node, of which ``scontrol --oneliner show`` prints one a line."""
    return [dict(field.split("=", 1) for field in line.split() if "=" in field) for line in text.splitlines()]


def most_gpus(text: str) -> dict[str, int]:
    """The most GPUs of a node of each partition, slices counted as GPUs, from what :func:`read_nodes` reads; without
    the partitions that have a node of which it is not clear.
    """
    found: dict[str, float] = {}
    for line in text.splitlines():
        fields = line.split("|", 7)
        if len(fields) == 8:
            listed = sum(_count_of(match) if match else math.inf for match in _listed_gpus(fields[7]))
            found[fields[0]] = max(found.get(fields[0], 0), listed)
    return {partition: int(gpus) for partition, gpus in found.items() if gpus != math.inf}


def _listed_gpus(gres: str) -> list[re.Match[str] | None]:
    """The type and number of each kind of GPU in ``gpu:a100:4(S:0-1),nvme:3600``; None for one that is not clear."""
    listed = [each for each in re.sub(r"\([^)]*\)", "", gres).split(",") if re.match(r"gpu(?::|$)", each)]
    return [_GPUS.fullmatch(each) for each in listed]


def _count_of(match: re.Match[str]) -> int:
    return int(match["count"] or 1)


def _gpus(gres: str) -> dict[str, Any]:
    """GPUs for a profile; of several kinds the first one counts, whole GPUs before slices of others."""
    found = [match for match in _listed_gpus(gres) if match and _count_of(match)]
    # Slurm lists them by their device files, so that slices of the first GPU precede the other GPUs.
    found.sort(key=lambda match: _SLICE.search(match["type"] or "") is not None)
    if not found:
        return {}
    others = " and ".join(match[0] for match in found[1:])
    return {"gpus": _count_of(found[0]), "gpu_type": found[0]["type"] or "", "other_gpus": others}


def number(text: str) -> int | None:
    """A number of one or more, which is how Slurm prints a limit; None without a limit."""
    return int(text) if re.fullmatch(r"[1-9][0-9]{0,8}", text) else None
