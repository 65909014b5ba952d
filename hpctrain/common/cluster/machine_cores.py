"""The cores of this machine that this process may use, as the kernel lists them."""

from __future__ import annotations

import re
from pathlib import Path

from hpctrain.common.cluster.cores import cores_of_list
from hpctrain.common.cluster.node_map import NumaNode
from hpctrain.common.cluster.rdma import kernel_text

_SYSTEM = "sys/devices/system"


def numa_nodes(root: Path = Path("/")) -> list[NumaNode]:
    """The nodes with the cores that this process may use; one node where the kernel tells none."""
    allowed = allowed_cpus(root)

    def cores(cpus: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(sorted({min(threads_of(cpu, root) & allowed) for cpu in allowed.intersection(cpus)}))

    folders = (root / _SYSTEM).glob("node/node[0-9]*")
    nodes = [
        NumaNode(index=(index := int(node.name[4:])), cores=cores(cpus_of_node(index, root) or ())) for node in folders
    ]
    return nodes or [NumaNode(index=0, cores=cores(_online(root)))]


def allowed_cpus(root: Path = Path("/")) -> set[int]:
    """The CPUs that this process may use, of those that are online: the kernel allows others, too."""
    status = (root / "proc/self/status").read_text()
    allowed = set(cores_of_list(re.findall(r"Cpus_allowed_list:\s*(\S+)", status)[0], "/proc/self/status"))
    return allowed.intersection(_online(root)) or allowed


def _online(root: Path) -> tuple[int, ...]:
    file = root / _SYSTEM / "cpu/online"
    return cores_of_list(kernel_text(file), str(file))


def cpus_of_node(index: int, root: Path = Path("/")) -> tuple[int, ...] | None:
    """All CPUs of a NUMA node, None where the kernel tells of no such node."""
    file = root / _SYSTEM / f"node/node{index}/cpulist"
    return cores_of_list(kernel_text(file), str(file)) if file.exists() else None


def threads_of(cpu: int, root: Path = Path("/")) -> set[int]:
    """The hardware threads of a CPU's core. A sandbox may tell none: then it is its own core."""
    siblings = root / _SYSTEM / f"cpu/cpu{cpu}/topology/thread_siblings_list"
    return {cpu, *cores_of_list(kernel_text(siblings), str(siblings))}
