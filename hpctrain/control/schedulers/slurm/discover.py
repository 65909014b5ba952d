"""Derives a cluster profile from what ``scontrol`` reports about the cluster at hand."""

from __future__ import annotations

import re
import shutil
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import date
from typing import Any

from hpctrain.common.cluster.programs import run_program
from hpctrain.common.errors import HpctrainError, nearest
from hpctrain.common.files.checked_yaml import validate
from hpctrain.control.schedulers.profile import ClusterProfile
from hpctrain.control.schedulers.scheduler import Cluster

# An overloaded controller takes tens of seconds.
_SECONDS = 60.0
_CONFIG = ("show", "config")
_PARTITIONS = ("--oneliner", "show", "partition")
_NODES = ("--oneliner", "show", "node")

# Nodes in these states run no jobs until somebody repairs them.
_BROKEN = ("DOWN", "DRAIN", "FAIL", "ERROR", "INVAL", "UNK", "FUTURE", "MAINT", "NOT_RESP", "REBOOT")
# ``gpu:a100:4(S:0-1)``; where no count stands it is 1. Source: _get_gres_cnt of Slurm's src/interfaces/gres.c.
_GPUS = re.compile(
    r"gpu(?::(?!no_consume)(?P<type>[A-Za-z][\w.-]*|[\w.-]+(?=:)))?(?::no_consume)?(?::(?P<count>[0-9]{1,4}))?",
    re.ASCII,
)

Settings = dict[str, str]


@dataclass(frozen=True, kw_only=True)
class NodeKind:
    """Equal nodes: the cores that a job can have, ``threads`` of a core as far as Slurm counts them, memory in MB."""

    cores: int
    threads: int
    memory: int
    gpus: int = 0
    gpu_type: str = ""

    def __str__(self) -> str:
        gpus = f"{self.gpus} GPUs{f' {self.gpu_type}' if self.gpu_type else ''}" if self.gpus else "no GPUs"
        threads = f" of {self.threads} hardware threads" if self.threads > 1 else ""
        return f"{gpus}, {self.cores} cores{threads}, {self.memory} MB"


def discover(partition: str | None) -> Cluster:
    """The profile of the cluster that this machine submits to.

    Args:
        partition: to describe; the default one if None. Of several with commas between, of which Slurm takes any, the
            first is described.

    Raises:
        HpctrainError: there is no Slurm, it does not answer, or the partition does not exist or runs no jobs.
    """
    if shutil.which("scontrol") is None:
        raise HpctrainError(
            "HT-slurm-not-here",
            "there is no Slurm here: scontrol is not on the PATH",
            "run on a login node of the cluster, load its Slurm module, or name a profile: --cluster generic",
        )
    config, partitions, nodes = (_scontrol(*what) for what in (_CONFIG, _PARTITIONS, _NODES))
    return profile_from(config, partitions, nodes, partition=partition, today=date.today())


def profile_from(config: str, partitions: str, nodes: str, *, partition: str | None, today: date) -> Cluster:
    """The profile that the texts of ``scontrol show`` describe.

    Raises:
        HpctrainError: as in :func:`discover`.
    """
    settings = read_config(config)
    known = {keys["PartitionName"]: keys for keys in _lines(partitions) if keys.get("PartitionName")}
    named = [_choose(known, name) for name in (partition.split(",") if partition else [None])]
    chosen = named[0]
    name = chosen["PartitionName"]
    kinds, broken = count_nodes(_lines(nodes), chosen)
    if not kinds:
        raise HpctrainError(
            "HT-slurm-partition-not-usable",
            "no node of the partition {partition} can run a job ({broken} down, drained or failed)",
            "name another one with --partition; sinfo lists what there is",
            partition=name,
            broken=broken,
        )
    version = settings.get("SLURM_VERSION", "of unknown version")
    profile = validate(
        _values(settings, chosen, kinds.most_common(1)[0][0])
        | {"partition": ",".join(keys["PartitionName"] for keys in named)}
        | {"source": f"scontrol of Slurm {version} on {today.isoformat()}"},
        ClusterProfile,
        lambda _: f"what Slurm says of the partition {name!r} makes no profile",
        "cluster profile",
        "name a profile instead: --cluster generic",
    )
    return Cluster(
        profile=profile,
        findings=_findings(profile, version, chosen, kinds, broken),
    )


def read_config(text: str) -> Settings:
    """The settings of ``scontrol show config``."""
    pairs = re.findall(r"^([\w\[\]]+)[ \t]*= ?(.*)$", text, re.MULTILINE | re.ASCII)
    return {key: value.strip() for key, value in pairs}


def count_nodes(nodes: Iterable[Settings], partition: Settings) -> tuple[Counter[NodeKind], int]:
    """How many nodes of each kind can run jobs of a partition, and how many cannot.

    Args:
        nodes: each as ``scontrol --oneliner show node`` prints it.
        partition: its settings, which may keep CPUs from jobs.
    """
    usable: Counter[NodeKind] = Counter()
    broken = 0
    for node in nodes:
        if partition["PartitionName"] not in node.get("Partitions", "").split(","):
            continue
        state = node.get("State", "UNKNOWN").upper()
        # '*' after a state: the node does not answer.
        if "*" in state or any(part.startswith(_BROKEN) for part in state.split("+")):
            broken += 1
        elif kind := _kind(node, partition):
            usable[kind] += 1
    return usable, broken


def _kind(node: Settings, partition: Settings) -> NodeKind | None:
    cpus, sockets, memory = _number(node, "CPUTot"), _number(node, "Sockets") or 0, _number(node, "RealMemory")
    cores = sockets * (_number(node, "CoresPerSocket") or 0)
    if not cpus or not cores:
        return None
    # Without the cores that the site keeps from jobs; CPUEfctv is new in 22.05.
    available = min(_number(node, "CPUEfctv") or cpus, _number(partition, "MaxCPUsPerNode") or cpus, cpus)
    # Slurm's CPUs are cores or hardware threads, as the site configures it.
    threads = max(1, cpus // cores)
    available_cores = max(1, min(available // threads, cores))
    return NodeKind(cores=available_cores, threads=threads, memory=memory or 0, **_gpus(node.get("Gres", "")))


def _gpus(gres: str) -> dict[str, Any]:
    """GPUs for a profile; of several kinds the first one counts."""
    parts = re.sub(r"\([^)]*\)", "", gres).split(",")
    found = [match for match in map(_GPUS.fullmatch, parts) if match and match["count"] != "0"]
    return {"gpus": int(found[0]["count"] or 1), "gpu_type": found[0]["type"] or ""} if found else {}


def _lines(text: str) -> list[Settings]:
    """The settings of each partition or node, of which ``scontrol --oneliner show`` prints one a line."""
    return [dict(field.split("=", 1) for field in line.split() if "=" in field) for line in text.splitlines()]


def _number(settings: Mapping[str, str], key: str) -> int | None:
    """A number of one or more; None for no limit, however Slurm prints that."""
    text = settings.get(key, "")
    return int(text) if re.fullmatch(r"[1-9][0-9]{0,8}", text) else None


def _choose(partitions: dict[str, Settings], name: str | None) -> Settings:
    up = {name: keys for name, keys in partitions.items() if keys.get("State") == "UP"}
    if name is not None and name not in up:
        raise HpctrainError(
            "HT-slurm-partition-not-usable",
            "there is no partition {partition!r} that is UP",
            nearest(name, up),
            partition=name,
        )
    default = [keys for keys in up.values() if keys.get("Default") == "YES"]
    if name is None and not default and len(up) != 1:
        raise HpctrainError(
            "HT-slurm-partition-not-usable",
            "Slurm has no default partition that is UP",
            f"--partition with one of {', '.join(up)}" if up else "sinfo lists what there is",
        )
    return up[name] if name is not None else (default or list(up.values()))[0]


def _values(config: Settings, partition: Settings, kind: NodeKind) -> dict[str, Any]:
    """The keys of a profile, as YAML has them."""
    exclusive = partition.get("OverSubscribe") == "EXCLUSIVE" or config.get("SelectType") == "select/linear"
    node: dict[str, Any] = {"gpus": kind.gpus, "cores": kind.cores, "threads_per_core": kind.threads}
    node["exclusive"] = exclusive
    if kind.gpus:
        node["gpu_type"] = kind.gpu_type or None
    if exclusive:
        most = _number(partition, "MaxMemPerNode")
        # All of the nodes' memory, or as much as a job may have.
        node["memory"] = f"{most}M" if most and most < kind.memory else "0"
    times = (partition.get(key, "") for key in ("DefaultTime", "MaxTime"))
    return {
        "name": re.sub(r"[^A-Za-z0-9_.-]+", "-", config.get("ClusterName", "")) or "cluster",
        "node": node,
        # Of a job that asks for none; None without a limit.
        "time": next((time for time in times if re.fullmatch(r"[0-9:-]+", time)), None),
    }


def _findings(
    profile: ClusterProfile, version: str, partition: Settings, kinds: Counter[NodeKind], broken: int
) -> tuple[str, ...]:
    default = ", the default" if partition.get("Default") == "YES" else ""
    nodes = "; ".join(f"{count} with {kind}" for kind, count in kinds.most_common())
    sharing = "each job has its own" if profile.node.exclusive else "jobs may share them, unless node.exclusive is set"
    lines = [
        f"cluster: {profile.name}, Slurm {version}",
        f"partition: {partition['PartitionName']}{default}, at most {partition.get('MaxTime', 'unknown')}",
        f"nodes: {nodes}{f'; {broken} more are down, drained or failed' if broken else ''}; {sharing}",
    ]
    if len(kinds) > 1:
        lines.append("nodes: of several kinds, the profile is of the first")
    if partition.get("AllowAccounts", "ALL") != "ALL":
        lines.append(f"accounts: only {partition['AllowAccounts']}, so name one with --account")
    return tuple(lines)


def _scontrol(*command: str) -> str:
    done = run_program("scontrol", *command, seconds=_SECONDS)
    if done.returncode != 0:
        printed = (done.stderr.strip() or done.stdout.strip()).splitlines()
        raise HpctrainError(
            "HT-slurm-command-failed",
            "Slurm does not answer: scontrol {command} exited {status}: {reason}",
            "scontrol ping says whether its controller is up, the variable SLURM_CONF names its slurm.conf; "
            "--cluster generic --dry-run asks no Slurm",
            exit_code=1,
            command=" ".join(command),
            status=done.returncode,
            reason=printed[-1] if printed else "nothing",
        )
    return done.stdout
