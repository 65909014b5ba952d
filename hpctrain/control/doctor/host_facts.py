"""The facts that the checks of one host use, read once from /sys, /proc, /dev and the process, under any root."""

from __future__ import annotations

import math
import os
import re
import resource
import shutil
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from hpctrain.common.cluster.interfaces import Interface, read_interfaces
from hpctrain.common.cluster.node_map import NodeMap
from hpctrain.common.cluster.rdma import RdmaPort, all_ports, kernel_text
from hpctrain.control.launchers.shortages import TEMPORARY_BYTES, fault, mpirun_folder
from hpctrain.control.topology.live import this_node


@dataclass(frozen=True, kw_only=True)
class Host:
    """One host as a rank, or the login shell, sees it.

    Attributes:
        ranks: how many ranks run on it.
        hosts: how many hosts the run has.
        memlock, nofile: soft and hard limit in bytes and files, infinite for none.
        shared_memory: bytes free in /dev/shm, None where there is none that can be written to.
        temporary: where mpirun and Python put their temporary files.
        temporary_fault: what is wrong with it, empty where nothing is.
        verbs: devices in /dev/infiniband that this process may open.
        driver: the version text of the GPU driver, empty without one.
        kernel: major and minor version of the Linux kernel.
        visible: ``CUDA_VISIBLE_DEVICES`` of each rank here, None where it is not set.
    """

    name: str
    environment: Mapping[str, str]
    ranks: int
    hosts: int
    memlock: tuple[float, float]
    nofile: tuple[float, float]
    shared_memory: int | None
    temporary: Path
    temporary_fault: str
    interfaces: tuple[Interface, ...]
    ports: tuple[RdmaPort, ...]
    verbs: tuple[str, ...]
    node_map: NodeMap
    modules: frozenset[str]
    driver: str
    kernel: tuple[int, int]
    visible: tuple[str | None, ...]


def read_host(
    root: Path = Path("/"),
    environment: Mapping[str, str] = os.environ,
    *,
    ranks: int = 1,
    hosts: int = 1,
    visible: tuple[str | None, ...] | None = None,
) -> Host:
    """The facts of the host this runs on.

    Args:
        root: the folder that holds /sys, /proc and /dev.
        ranks, hosts: how many ranks run here, and how many hosts take part.
        visible: ``CUDA_VISIBLE_DEVICES`` of each rank here; by default all have that of ``environment``.

    Raises:
        HpctrainError: there is no /sys.
    """
    shared, temporary = root / "dev/shm", mpirun_folder(environment)
    version = re.match(r"(\d+)\.(\d+)", kernel_text(root / "proc/sys/kernel/osrelease"))
    verbs = sorted(root.glob("dev/infiniband/uverbs*"))
    return Host(
        # A local Slurm for tests, and a front end with aliases, give their nodes other names than the system.
        name=environment.get("SLURMD_NODENAME") or socket.gethostname(),
        environment=environment,
        ranks=ranks,
        hosts=hosts,
        memlock=_limit(resource.RLIMIT_MEMLOCK),
        nofile=_limit(resource.RLIMIT_NOFILE),
        shared_memory=None if fault(shared, 0) else shutil.disk_usage(shared).free,
        temporary=temporary,
        temporary_fault=fault(temporary, TEMPORARY_BYTES),
        interfaces=tuple(read_interfaces(root)),
        ports=tuple(all_ports(root / "sys/class/infiniband")),
        verbs=tuple(path.name for path in verbs if os.access(path, os.R_OK | os.W_OK)),
        node_map=this_node(root),
        modules=frozenset(line.split()[0] for line in kernel_text(root / "proc/modules").splitlines()),
        driver=kernel_text(root / "proc/driver/nvidia/version"),
        kernel=(int(version[1]), int(version[2])) if version else (0, 0),
        visible=visible if visible is not None else (environment.get("CUDA_VISIBLE_DEVICES"),) * ranks,
    )


def _limit(kind: int) -> tuple[float, float]:
    soft, hard = (math.inf if value == resource.RLIM_INFINITY else value for value in resource.getrlimit(kind))
    return soft, hard
