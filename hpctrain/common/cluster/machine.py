"""The facts about the machine and its environment that planning needs."""

from __future__ import annotations

import os
import platform
import re
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
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
