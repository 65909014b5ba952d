"""Derives a cluster profile from what Slurm reports about the cluster at hand."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date
from typing import Any

from hpctrain.common.cluster.programs import program_output, run_program
from hpctrain.common.errors import HpctrainError, nearest
from hpctrain.common.files.checked_yaml import dump, validate
from hpctrain.control.schedulers.profile import ClusterProfile
from hpctrain.control.schedulers.slurm.limits import Limits, read_limits
from hpctrain.control.schedulers.slurm.nodes import (
    DETAILS,
    NODES,
    Keys,
    NodeKind,
    Nodes,
    most_cpus,
    most_gpus,
    number,
    read_keys,
    read_nodes,
)

# An overloaded controller takes tens of seconds.
_SECONDS = 60.0
_CONFIG = ("scontrol", "show", "config")
_PARTITIONS = ("scontrol", "--oneliner", "show", "partition")
_TOPOLOGY = ("scontrol", "show", "topology")
_MPI = ("srun", "--mpi=list")


@dataclass(frozen=True, kw_only=True)
class Discovered:
    """A profile, one line for each fact that was found, with its source, and what the partitions allow a job."""

    profile: ClusterProfile
    findings: tuple[str, ...]
    limits: tuple[Limits, ...]


@dataclass(frozen=True, kw_only=True)
class Answers:
    """The output of Slurm's programs; ``topology`` and ``details`` are empty where that cannot be asked for."""

    nodes: str
    config: str
    partitions: str
    mpi: str
    topology: str = ""
    details: str = ""


def discover(partition: str | None) -> Discovered:
    """The profile of the cluster that this machine submits to.

    Args:
        partition: to describe; the default one if None. Of several with commas between, of which Slurm takes any, the
            first is described.

    Raises:
        HpctrainError: there is no Slurm, it does not answer, or the partition does not exist or runs no jobs.
    """
    if shutil.which(NODES[0]) is None:
        raise HpctrainError(
            "HT-slurm-not-here",
            "there is no Slurm here: sinfo is not on the PATH",
            "run on a login node of the cluster, load its Slurm module, or name a profile: --cluster generic",
        )
    answers = Answers(
        nodes=_ask(*NODES),
        config=_ask(*_CONFIG),
        partitions=_ask(*_PARTITIONS),
        mpi=_ask_mpi(),
        topology=program_output(*_TOPOLOGY),
        details=program_output(*DETAILS),
    )
    return profile_from(answers, partition, date.today())


def profile_from(answers: Answers, partition: str | None, today: date) -> Discovered:
    """The profile that the answers describe.

    Raises:
        HpctrainError: as in :func:`discover`.
    """
    config = read_config(answers.config)
    partitions = read_partitions(answers.partitions)
    nodes = read_nodes(answers.nodes, partitions, answers.details)
    listed = [_choose(partitions, name) for name in (partition.split(",") if partition else [None])]
    chosen = listed[0]
    name = chosen["PartitionName"]
    if name not in nodes or not nodes[name].usable:
        broken = nodes[name].broken if name in nodes else 0
        raise HpctrainError(
            "HT-slurm-partition-not-usable",
            "no node of the partition {partition} can run a job ({broken} down, drained or failed)",
            f"name another one with --partition; {_with_nodes(nodes)}",
            partition=name,
            broken=broken,
        )
    version = config.get("SLURM_VERSION", "of unknown version")
    profile = validate(
        _values(config, chosen, nodes[name].kind)
        | {"partition": ",".join(keys["PartitionName"] for keys in listed)}
        | {"source": f"sinfo and scontrol of Slurm {version} on {today.isoformat()}", "remark": "discovered"},
        ClusterProfile,
        lambda _: f"what Slurm says of the partition {name!r} makes no profile",
        "cluster profile",
        "name a profile instead: --cluster generic",
    )
    findings = (
        f"cluster: {profile.name}, Slurm {version} (scontrol show config)",
        *_partition_findings(chosen, nodes[name], nodes, profile.node.exclusive),
        *_config_findings(config, answers.topology, read_mpi_plugins(answers.mpi)),
    )
    return Discovered(profile=profile, findings=findings, limits=_limits(listed, answers.nodes, answers.details))


def known_limits(partition: str | None) -> tuple[Limits, ...]:
    """What Slurm says that partitions allow a job; nothing where there is no Slurm, or none that is understood.

    Args:
        partition: as in :func:`discover`; the default one if None.
    """
    # A list that this Slurm does not have may be another cluster's.
    if "SLURM_CLUSTERS" in os.environ:
        return ()
    partitions = read_partitions(program_output(*_PARTITIONS))
    default = next((name for name, keys in partitions.items() if keys.get("Default") == "YES"), "")
    names = (partition or default).split(",")
    if not partitions.keys() >= set(names):
        return ()
    return _limits([partitions[name] for name in names], program_output(*NODES), program_output(*DETAILS))


def _limits(partitions: Sequence[Keys], nodes: str, details: str) -> tuple[Limits, ...]:
    named = {keys["PartitionName"]: keys for keys in partitions}
    gpus, cpus = most_gpus(nodes), most_cpus(nodes, named, details)
    return tuple(read_limits(keys, gpus.get(name), cpus.get(name)) for name, keys in named.items())


def profile_yaml(profile: ClusterProfile) -> str:
    """The text of a file that ``load_profile`` reads as the same profile."""
    head = (
        f"# Discovered by {profile.source}.\n"
        "# What is left out has its default; hpctrain/control/schedulers/profile.py describes every key.\n"
    )
    return head + dump(profile.model_dump(mode="json", exclude_defaults=True))


def read_config(text: str) -> Keys:
    """The settings of ``scontrol show config``."""
    pairs = re.findall(r"^([\w\[\]]+)[ \t]*= ?(.*)$", text, re.MULTILINE | re.ASCII)
    return {key: value.strip() for key, value in pairs}


def read_partitions(text: str) -> dict[str, Keys]:
    """The settings of each partition by its name, from ``scontrol --oneliner show partition``."""
    return {keys["PartitionName"]: keys for keys in read_keys(text) if keys.get("PartitionName")}


def read_mpi_plugins(text: str) -> list[str]:
    """The plugins of ``srun --mpi=list``, whose form differs between versions."""
    lines = [line.removeprefix("srun:").strip() for line in text.splitlines()]
    listed = [
        name for line in lines for name in re.sub(r"^specific pmix plugin versions available:", "", line).split(",")
    ]
    return sorted({name.strip() for name in listed if re.fullmatch(r"\s*(pmi|pmix|cray|none|openmpi)\w*\s*", name)})


def _choose(partitions: dict[str, Keys], asked: str | None) -> Keys:
    up = {name: keys for name, keys in partitions.items() if keys.get("State") == "UP"}
    if asked is not None and asked not in partitions:
        raise HpctrainError(
            "HT-slurm-partition-not-usable", "there is no partition {partition!r}", nearest(asked, up), partition=asked
        )
    if asked is not None and asked not in up:
        raise HpctrainError(
            "HT-slurm-partition-not-usable",
            "the partition {partition} is {state}, not UP",
            partition=asked,
            state=partitions[asked].get("State", "in no known state"),
        )
    if not up:
        raise HpctrainError(
            "HT-slurm-partition-not-usable",
            "Slurm has no partition that is UP and that you may see",
            "sinfo lists what there is",
        )
    default = [keys for keys in up.values() if keys.get("Default") == "YES"]
    if asked is None and not default and len(up) > 1:
        raise HpctrainError(
            "HT-slurm-partition-not-usable",
            "Slurm has no default partition that is UP",
            f"--partition with one of {', '.join(up)}",
        )
    return up[asked] if asked is not None else (default or list(up.values()))[0]


def _values(config: Keys, partition: Keys, kind: NodeKind) -> dict[str, Any]:
    """The keys of a profile, as YAML has them."""
    exclusive = partition.get("OverSubscribe") == "EXCLUSIVE" or config.get("SelectType") == "select/linear"
    node: dict[str, Any] = {"gpus": kind.gpus, "cores": kind.cores, "threads_per_core": kind.threads}
    node["exclusive"] = exclusive
    if kind.gpus:
        # Only select/cons_tres supports --gpus-per-node.
        tres = config.get("SelectType", "select/cons_tres") == "select/cons_tres"
        node |= {"gpu_type": kind.gpu_type or None, "gpu_option": "gpus-per-node" if tres else "gres"}
    if memory := _memory(partition, kind, exclusive):
        node["memory"] = memory
    return {
        "name": re.sub(r"[^A-Za-z0-9_.-]+", "-", config.get("ClusterName", "")) or "cluster",
        "node": node,
        "partition": partition["PartitionName"],
        "time": _time(partition),
        "max_nodes": number(partition.get("MaxNodes", "")),
    }


def _memory(partition: Keys, kind: NodeKind, exclusive: bool) -> str | None:
    """What a job on whole nodes asks for, all of their memory or as much as it may have; None for Slurm's default.

    Slurm refuses jobs whose default, by the number of their CPUs, is more than they may have.
    """
    most = number(partition.get("MaxMemPerNode", ""))
    usual = (number(partition.get("DefMemPerCPU", "")) or 0) * kind.cores * kind.threads
    if most and most < (kind.memory if exclusive else usual):
        return f"{most}M"
    return "0" if exclusive else None


def _time(partition: Keys) -> str | None:
    """The time limit of a job that asks for none; None without a limit."""
    times = (partition.get(key, "") for key in ("DefaultTime", "MaxTime"))
    return next((time for time in times if re.fullmatch(r"[0-9:-]+", time)), None)


def _partition_findings(partition: Keys, here: Nodes, nodes: dict[str, Nodes], exclusive: bool) -> list[str]:
    name = partition["PartitionName"]
    default = ", the default" if partition.get("Default") == "YES" else ""
    longest, usual = partition.get("MaxTime", "unknown"), partition.get("DefaultTime", "NONE")
    lines = [
        f"partition: {name}{default} (scontrol show partition)",
        f"time: at most {longest}, {'all of it' if usual == 'NONE' else usual} by default (scontrol show partition)",
        f"nodes: {here.usable.total()} with {_kinds(here)} (sinfo)"
        if len(here.usable) == 1
        else f"nodes: of several kinds, the profile is of the first: {_kinds(here)} (sinfo)",
    ]
    if here.broken:
        lines.append(f"nodes: {here.broken} more are down, drained or failed (sinfo)")
    if exclusive:
        lines.append("nodes: each job has its own (OverSubscribe, SelectType)")
    else:
        lines.append(
            "nodes: jobs may share them, unless node.exclusive asks for whole ones (OverSubscribe, SelectType)"
        )
    if partition.get("AllowAccounts", "ALL") != "ALL":
        lines.append(
            f"accounts: only {partition['AllowAccounts']}, so name one with --account (scontrol show partition)"
        )
    with_gpus = sorted(other for other, theirs in nodes.items() if any(kind.gpus for kind in theirs.usable))
    if not here.kind.gpus and with_gpus:
        lines.append(f"GPUs: none here; --partition {' or '.join(with_gpus)} has some (sinfo)")
    return lines


def _kinds(nodes: Nodes) -> str:
    if len(nodes.usable) == 1:
        return str(nodes.kind)
    return "; ".join(f"{count} with {kind}" for kind, count in nodes.usable.most_common())


def _config_findings(config: Keys, topology: str, plugins: Sequence[str]) -> list[str]:
    plugin = config.get("TopologyPlugin", "unknown")
    # A topology.yaml (25.05 and later) takes precedence over the plugin.
    if plugin.startswith(("topology/tree", "topology/block")) or re.search(r"\b(?:Switch|Block)Name=", topology):
        order = "the hosts of a job are ordered by its switches"
    else:
        order = "Slurm knows no switches: fabric in the profile can name the output of ibnetdiscover"
    return [
        f"topology: {plugin}: {order} (scontrol show config, scontrol show topology)",
        f"launcher: srun has {', '.join(plugins) or 'no plugin that it lists'} (srun --mpi=list); "
        "which one works, or mpirun, is found out in the job",
    ]


def _with_nodes(nodes: dict[str, Nodes]) -> str:
    names = sorted(name for name, theirs in nodes.items() if theirs.usable)
    return f"with nodes: {', '.join(names)}" if names else "no other has any either"


def _ask(*command: str) -> str:
    done = run_program(*command, seconds=_SECONDS)
    if done.returncode != 0:
        said = (done.stderr.strip() or done.stdout.strip()).splitlines()
        raise HpctrainError(
            "HT-slurm-command-failed",
            "Slurm does not answer: {command} exited {status}: {reason}",
            "scontrol ping says whether its controller is up, the variable SLURM_CONF names its slurm.conf; "
            "--cluster generic --dry-run asks no Slurm",
            exit_code=1,
            command=" ".join(command),
            status=done.returncode,
            reason=said[-1] if said else "nothing",
        )
    return done.stdout


def _ask_mpi() -> str:
    """The list of srun's MPI plugins, which older versions print on stderr; empty without srun."""
    try:
        done = run_program(*_MPI, seconds=_SECONDS)
    except HpctrainError:
        return ""
    return f"{done.stdout}\n{done.stderr}"
