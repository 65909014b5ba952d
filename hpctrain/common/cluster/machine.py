"""The facts about the machine and its environment that planning needs, and the memory that a job may have on it."""

from __future__ import annotations

import contextlib
import os
import platform
import re
import socket
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING

from hpctrain.common.cluster.gpus import smallest_memory, usable_gpus
from hpctrain.common.settings import POD_CPUS

if TYPE_CHECKING:
    # At run time it would have every host that reports its versions build the recipes' models, which takes longer than
    # everything else that the host does then.
    from hpctrain.common.recipes.families import Framework

# The modules that each framework needs; Keras runs on TensorFlow here.
_MODULES: dict[Framework, tuple[str, ...]] = {"torch": ("torch",), "keras": ("tensorflow", "keras")}
# One package can come from several distributions; the first that is installed counts.
_DISTRIBUTIONS = {
    "hpctrain": ("hpctrain",),
    "torch": ("torch",),
    "tensorflow": ("tensorflow", "tensorflow-cpu", "tensorflow-gpu", "tf-nightly"),
    "keras": ("keras",),
    "horovod": ("horovod",),
    "mpi4py": ("mpi4py",),
    "numpy": ("numpy",),
}


@dataclass(frozen=True, kw_only=True)
class Machine:
    """One host and its Python environment.

    Attributes:
        cores: physical cores that this process may use.
        processors: hardware threads that it may use, of which a core can have several; 0 where they were not counted.
        frameworks: those that can be imported.
        versions: by name, those of Python and of the packages that decide a run's numbers.
        gpus: how many this process may use.
        gpu_memory: measures :attr:`gpu_bytes`, which starts the driver's library and few plans need.
        available_bytes: the host's memory that processes can still have; None where it is not known.
    """

    host: str
    cores: int
    frameworks: frozenset[Framework]
    versions: dict[str, str]
    processors: int = 0
    gpus: int = 0
    gpu_memory: Callable[[], int | None] = lambda: None
    available_bytes: int | None = None

    @property
    def gpu_bytes(self) -> int | None:
        """The memory of the GPU that has least; None where there is none, or it is not known."""
        return self.gpu_memory() if self.gpus else None


def same_host(one: str, other: str) -> bool:
    """Whether two names are of the same host; a name without a domain matches any domain."""
    if "." in one and "." in other:
        return one == other
    return one.partition(".")[0] == other.partition(".")[0]


def this_machine() -> Machine:
    """The facts about this machine; imports no framework."""
    return Machine(
        host=socket.gethostname(),
        cores=usable_cores(),
        frameworks=installed_frameworks(),
        versions=versions(),
        processors=usable_processors(),
        gpus=usable_gpus(),
        gpu_memory=smallest_memory,
        available_bytes=available_bytes(),
    )


def installed_frameworks() -> frozenset[Framework]:
    """The frameworks that this Python can import; none is imported."""
    return frozenset(name for name, modules in _MODULES.items() if all(find_spec(m) for m in modules))


def as_if_installed(frameworks: frozenset[Framework]) -> tuple[frozenset[Framework], tuple[str, ...]]:
    """For a plan that is only shown: if no framework is installed, both of them, and a warning."""
    if frameworks:
        return frameworks, ()
    warning = "this Python has neither PyTorch nor Keras, so nothing can train in it: pip install 'hpctrain[torch]'"
    return frozenset(_MODULES), (warning,)


def usable_cores(environment: Mapping[str, str] = os.environ) -> int:
    """The physical cores that this process may use, which a batch system or container may restrict."""
    # Imported here, because a job for other hosts counts no cores.
    import psutil

    logical = psutil.cpu_count()
    physical = psutil.cpu_count(logical=False)
    allowed = usable_processors(environment)
    return max(1, allowed * physical // logical) if logical and physical else allowed


def usable_processors(environment: Mapping[str, str] = os.environ) -> int:
    """The hardware threads that this process may use.

    Not every Slurm narrows the affinity, so the job's CPUs on its smallest node are a limit too. A pod's limit is one
    on the processors' time, which affinity does not show.
    """
    # 4(x2),2 for two nodes with 4 CPUs, that is hardware threads, and one with 2
    job = [int(cpus) for cpus in re.findall(r"(?:^|,)(\d+)", environment.get("SLURM_JOB_CPUS_PER_NODE", ""))]
    pod = POD_CPUS.read(environment)
    # The launcher's pod may itself have fewer processors than the pods of the ranks.
    return pod if pod is not None else min([len(os.sched_getaffinity(0)), *job])


def available_bytes(environment: Mapping[str, str] = os.environ) -> int:
    """The memory that processes of this host can still have, of which a job of Slurm may have a part only."""
    # Imported here, because a job for other hosts needs no memory here.
    import psutil

    free: int = psutil.virtual_memory().available
    job = environment.get("SLURM_MEM_PER_NODE", "")
    # In MiB; 0 for all that the node has.
    return min(free, int(job) * 2**20) if job.isdecimal() and int(job) else free


def versions() -> dict[str, str]:
    """The versions of Python and of the installed packages that decide a run's numbers."""
    found = {package: installed_version(package) for package in _DISTRIBUTIONS}
    return {"python": platform.python_version(), **{package: version for package, version in found.items() if version}}


def installed_version(package: str) -> str | None:
    """The version of an installed package, read without importing it; None if it is not installed."""
    # Imported here because it takes 10 ms, which a command that is refused does not need.
    from importlib import metadata

    for distribution in _DISTRIBUTIONS[package]:
        try:
            return metadata.version(distribution)
        except metadata.PackageNotFoundError:
            continue
    return None


# Of version 1 and 2: the folder of the hierarchy, and the files with limit, peak and counts of killed processes.
_FILES = {
    "memory": ("memory", "memory.limit_in_bytes", "memory.max_usage_in_bytes", "memory.oom_control"),
    "": ("", "memory.max", "memory.peak", "memory.events"),
}
# Version 1 has a limit of nearly 2^63 where there is none.
_UNLIMITED = 1 << 60
_MOST_GROUPS = 1000
HOST_KILLS = Path("/proc/vmstat")


@dataclass(frozen=True, kw_only=True)
class GroupMemory:
    """The memory of a control group and those below it.

    Attributes:
        peak: the most that they have had; None where the kernel does not count it.
    """

    limit: int
    peak: int | None
    kills: int

    def __str__(self) -> str:
        limit = f"this job can have {self.limit / 1e9:.3g} GB there"
        return limit if self.peak is None else f"{limit}, and it used {self.peak / 1e9:.3g} GB at most"


def group_memory(
    root: Path = Path("/sys/fs/cgroup"), membership: Path = Path("/proc/self/cgroup")
) -> GroupMemory | None:
    """The memory of the outermost group of this process that has a limit: a job's has one for all of its steps.

    None where no group has one, or the files cannot be read.
    """
    with contextlib.suppress(OSError, ValueError):
        for line in membership.read_text().splitlines():
            _, controllers, place = line.split(":", 2)
            if controllers in _FILES:
                folder, limit, peak, events = _FILES[controllers]
                for group in accumulate(Path(place).parts[1:], Path.__truediv__, initial=root / folder):
                    if (most := _number(group / limit)) is not None and most < _UNLIMITED:
                        kills = _kills(group, events, below=controllers == "memory")
                        return GroupMemory(limit=most, peak=_number(group / peak), kills=kills)
    return None


def host_memory() -> GroupMemory:
    """What this process can have of its host's memory, and how many processes the kernel killed there since the boot.

    Another host can be asked for that number by a program of the system, which needs no place in the job's group.
    """
    import psutil

    group, most = group_memory(), psutil.virtual_memory().total
    kills = _kills(HOST_KILLS.parent, HOST_KILLS.name, below=False)
    return GroupMemory(limit=min(group.limit, most) if group else most, peak=None, kills=kills)


def _number(file: Path) -> int | None:
    with contextlib.suppress(OSError):
        text = file.read_text().strip()
        return int(text) if text.isdecimal() else None
    return None


def _kills(group: Path, name: str, *, below: bool) -> int:
    """How many processes were killed; of version 1 each group counts its own alone."""
    found = 0
    for file in _some(group.rglob(name)) if below else [group / name]:
        with contextlib.suppress(OSError):
            found += kills_in(file.read_text())
    return found


def kills_in(text: str) -> int:
    """The number of processes that were killed for want of memory, in a file of the kernel."""
    return sum(map(int, re.findall(r"^oom_kill (\d+)$", text, re.M)))


def _some(files: Iterator[Path]) -> Iterator[Path]:
    with contextlib.suppress(OSError):  # groups end meanwhile
        yield from (file for file, _ in zip(files, range(_MOST_GROUPS), strict=False))
