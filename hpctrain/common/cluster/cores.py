"""The cores of machines: lists and masks as the kernel, NCCL and hwloc print them, and those of this machine."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

from hpctrain.common.cluster.node_map import NumaNode
from hpctrain.common.cluster.rdma import kernel_text
from hpctrain.common.errors import HpctrainError

# More than any machine has; a wrong file must not fill the memory.
MOST_CPUS = 65536
_SYSTEM = "sys/devices/system"


def cores_of_list(text: str, where: str) -> tuple[int, ...]:
    """The CPUs of a list such as ``0-31,64-95``, ascending.

    Raises:
        HpctrainError: not such a list.
    """
    cpus: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        match = re.fullmatch(r"([0-9]{1,9})(?:-([0-9]{1,9}))?", part)
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if not first <= last < MOST_CPUS:
            raise _no_cpus(text, where, "list of CPUs such as 0-31,64-95")
        cpus.update(range(first, last + 1))
    return tuple(sorted(cpus))


def cores_of_mask(text: str, where: str) -> tuple[int, ...]:
    """The CPUs of a mask of 32-bit words, highest first, such as ``00000000,0000ffff`` or ``0x00000001,,0x0``.

    An empty word is zero, and a mask without commas may be of any length. ``0xf...f``, hwloc's endless run of ones, is
    refused.

    Raises:
        HpctrainError: not such a mask.
    """
    words = text.strip().split(",")
    digits = 8 if len(words) > 1 else MOST_CPUS // 4
    word_of_mask = re.compile(rf"((0x)?[0-9a-fA-F]{{1,{digits}}})?")
    if len(words) * 32 > MOST_CPUS or not all(map(word_of_mask.fullmatch, words)):
        raise _no_cpus(text, where, "mask of CPUs such as 00000000,0000ffff")
    mask = 0
    for word in words:
        mask = mask << 32 | int(word or "0", 16)
    return tuple(cpu for cpu in range(mask.bit_length()) if mask >> cpu & 1)


def _no_cpus(text: str, where: str, wanted: str) -> HpctrainError:
    text = text.strip()[:80]
    return HpctrainError(
        "HT-cores-not-a-list", "{where}: {text!r} is not a {wanted}", where=where, text=text, wanted=wanted
    )


def cores_of_nodes(nodes: Sequence[tuple[int, ...]]) -> list[tuple[int, ...] | None]:
    """The first hardware thread of each core of each NUMA node, for formats that list CPUs but not threads.

    Linux numbers the second threads of all cores after all first ones, so a node with two threads a core has two runs
    of equal length (0-31,64-95), and a node with one run has one thread a core, or the threads of a core side by side.
    Of other nodes (0-3,8-10, or every second CPU) nobody can tell which CPUs share a core, nor of nodes that list the
    same CPU, as files of some clouds do: None.

    Args:
        nodes: the CPUs of each NUMA node, ascending.
    """
    runs = [_runs(cpus) for cpus in nodes]
    nodes_of_cpu = Counter(cpu for cpus in nodes for cpu in set(cpus))
    halves = [each for each in runs if len(each) == 2 and len(each[0]) == len(each[1])]
    # If a first run lies after a second one, the runs are not the threads of the same cores.
    threads = halves and max(first[-1] for first, _ in halves) < min(second[0] for _, second in halves)

    def cores(of_node: list[tuple[int, ...]]) -> tuple[int, ...] | None:
        if any(nodes_of_cpu[cpu] > 1 for run in of_node for cpu in run):
            return None
        if len(of_node) < 2:
            return of_node[0] if of_node else ()
        return of_node[0] if threads and of_node in halves else None

    return [cores(each) for each in runs]


def _runs(cpus: Sequence[int]) -> list[tuple[int, ...]]:
    """The runs of neighbours."""
    starts = [place for place in range(len(cpus)) if place == 0 or cpus[place] != cpus[place - 1] + 1]
    return [tuple(cpus[start:end]) for start, end in pairwise([*starts, len(cpus)])]


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
