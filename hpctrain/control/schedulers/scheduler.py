"""What hpctrain asks of a scheduler. Slurm, Kubernetes, and those of qsub have a folder each beside this file.

A package of its own adds one by an entry point of the group ``hpctrain.schedulers``: a class derived from
:class:`Scheduler`, by the name that ``scheduler`` in a cluster profile says.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import TYPE_CHECKING

from hpctrain.common.cluster.machine import installed_frameworks
from hpctrain.common.errors import HpctrainError, nearest
from hpctrain.common.recipes.families import Framework
from hpctrain.common.run.directory import RunDirectory
from hpctrain.common.run.plan import Plan
from hpctrain.common.run.request import TrainingRequest, unplaced_plan
from hpctrain.control.schedulers.jobs import JobState
from hpctrain.control.schedulers.profile import ClusterProfile, load_profile

if TYPE_CHECKING:
    from hpctrain.control.schedulers.job_request import JobRequest

_GROUP = "hpctrain.schedulers"
_BUILT_IN = {
    "slurm": "hpctrain.control.schedulers.slurm.slurm_scheduler:Slurm",
    "kubernetes": "hpctrain.control.schedulers.kubernetes.kubernetes_scheduler:Kubernetes",
    "pbs": "hpctrain.control.schedulers.qsub.pbs:Pbs",
    "grid_engine": "hpctrain.control.schedulers.qsub.grid_engine:GridEngine",
}
# Of the cluster at hand, and of jobs in which a run was started by hand.
DEFAULT = "slurm"

Say = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """A profile, and what is known of its cluster.

    Attributes:
        findings: what was found at the cluster at hand, a line each.
    """

    profile: ClusterProfile
    findings: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Order:
    """What is to be submitted.

    Attributes:
        options: of the command line that were given, such as ``--mount``.
        image: the container's, as it was given.
        run_dir: None for a new directory named by the work and the time.
        check: every node is checked before the ranks start.
        verify: a few steps are compared with those of one process before the run begins.
        no_copy: the jobs run the script where it is, instead of a copy of its code.
    """

    cluster: Cluster
    request: JobRequest
    training: TrainingRequest
    options: Collection[str] = ()
    image: str | None = None
    run_dir: Path | None = None
    check: bool = False
    verify: bool = False
    no_copy: bool = False

    def plan(self, frameworks: frozenset[Framework] | None = None) -> Plan:
        """The plan of the run, which has no hosts yet."""
        known = installed_frameworks() if frameworks is None else frameworks
        return unplaced_plan(self.request.training(self.training), known)


@dataclass(frozen=True, kw_only=True)
class Submitted:
    """The run directory, as its ranks see it, the jobs' numbers, first to last, and how to follow them."""

    directory: Path
    jobs: tuple[str, ...]
    advice: str


class Scheduler(ABC):
    """Where jobs run."""

    def discover(self, partition: str | None) -> Cluster:
        """The cluster at hand, for which the default scheduler alone is asked.

        Raises:
            HpctrainError: it cannot be found out.
        """
        raise NotImplementedError

    @abstractmethod
    def describe(self, order: Order, say: Say) -> str:
        """The text of what :meth:`submit` would submit, which other programs read. Writes nothing.

        Args:
            say: gets warnings, and what was found out.

        Raises:
            HpctrainError: the order cannot be met.
        """

    @abstractmethod
    def submit(self, order: Order, say: Say) -> Submitted:
        """Submit a run; all of it or nothing.

        Raises:
            HpctrainError: as :meth:`describe`, or the scheduler refuses.
        """

    @abstractmethod
    def list(self, jobs: Collection[str] | None, *, user: int, seconds: float) -> Sequence[JobState]:
        """The jobs with these numbers that the scheduler knows; for None those of a user that live.

        Args:
            user: the number of the user whose jobs they are.
            seconds: how long the scheduler may take to answer.

        Raises:
            HpctrainError: it does not answer.
        """

    @abstractmethod
    def cancel(self, jobs: Sequence[str]) -> None:
        """End these jobs, which need not have ended when this returns.

        Raises:
            HpctrainError: the scheduler refuses or does not answer.
        """

    def logs(self, directory: RunDirectory, jobs: Sequence[str]) -> Sequence[Path]:
        """The files of what these jobs printed, the last one last; of all the run's jobs where none of them has one."""
        if logs := [path for number in jobs if (path := directory.logs / f"job-{number}.log").exists()]:
            return logs
        return sorted(directory.logs.glob("job-*.log"), key=lambda path: (len(path.name), path.name))

    def joules(self, jobs: Sequence[str], *, seconds: float) -> int | None:
        """The energy that the nodes of these jobs drew; None where nobody measures it."""
        return None


def _entries() -> dict[str, EntryPoint]:
    """Every scheduler by name, the default one first."""
    built_in = [EntryPoint(name, place, _GROUP) for name, place in _BUILT_IN.items()]
    return {entry.name: entry for entry in (*built_in, *entry_points(group=_GROUP))}


@cache
def scheduler(name: str) -> Scheduler:
    """The scheduler of this name.

    Raises:
        HpctrainError: there is none, or the package that adds it cannot be loaded.
    """
    known = _entries()
    if name not in known:
        raise HpctrainError("HT-choice-unknown", "there is no scheduler {name!r}", nearest(name, [*known]), name=name)
    try:
        loaded: Scheduler = known[name].load()()
    except Exception as error:  # whatever another package's module raises
        raise HpctrainError(
            "HT-scheduler-unusable",
            "the scheduler {name!r} of {module} cannot be loaded: {reason}",
            "mend or uninstall its package",
            name=name,
            module=known[name].value,
            reason=error,
        ) from error
    return loaded


def find_cluster(name: str, partition: str | None) -> Cluster:
    """The cluster of a profile's name or file, or the one at hand for ``auto``.

    Raises:
        HpctrainError: there is no such profile, or nothing to discover.
    """
    if name != "auto":
        return Cluster(profile=load_profile(name))
    return scheduler(DEFAULT).discover(partition)


def schedulers() -> list[Scheduler]:
    """All that can be loaded, the default one first."""
    usable = []
    for name in _entries():
        with contextlib.suppress(HpctrainError):
            usable.append(scheduler(name))
    return usable
