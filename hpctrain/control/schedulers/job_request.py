"""The request to Slurm for one run, from a cluster's profile and the command line, checked before it is sent."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from hpctrain.common.cluster.gpus import require_shareable
from hpctrain.common.files.checked_yaml import validate
from hpctrain.common.frozen import FrozenModel
from hpctrain.common.run.plan import Container, HostOptions
from hpctrain.common.run.request import TrainingRequest
from hpctrain.control.schedulers.profile import ClusterProfile, JobTerms, Line, Memory, Word

# The file of :class:`JobSettings` in a run directory.
SETTINGS = "job.json"
# Slurm accepts only one of these options.
_MEMORY = frozenset(("mem", "mem-per-cpu", "mem-per-gpu"))
# Slurm may send the signal this much too early.
_EARLY_SECONDS = 60
# The share of the time between the signal and the end that ranks have; the rest is for the requeue, or for ending the
# launcher of a pod.
_STOP_SHARE = 0.8


class JobRequest(JobTerms):
    """The request for one submission. Memory and time are in Slurm's notation; None leaves a value to Slurm.

    Attributes:
        spare: nodes that the job has beside those of the run.
    """

    name: Annotated[Line, Field(max_length=256)]
    nodes: Annotated[int, Field(ge=1)] = 1
    spare: Annotated[int, Field(ge=0)] = 0
    tasks_per_node: Annotated[int, Field(ge=1)] = 1
    cpus_per_task: Annotated[int, Field(ge=1)] | None = None
    gpus_per_node: Annotated[int, Field(ge=0)] = 0
    gpu_type: str | None = None
    memory: Memory | None = None
    exclusive: bool = False
    dependency: Word | None = None

    @property
    def ranks(self) -> int:
        """The number of ranks, one per task."""
        return self.nodes * self.tasks_per_node

    def training(self, asked: TrainingRequest) -> TrainingRequest:
        """What is asked for, on the ranks of the job, and stopped before its end.

        Raises:
            HpctrainError: ranks are to share GPUs on several nodes, or where there is one for each or none.
        """
        if asked.start.share_gpus:
            require_shareable((f"node {n}", self.tasks_per_node, self.gpus_per_node) for n in range(self.nodes))
        seconds = self.signal_seconds * _STOP_SHARE
        stop = asked.stop.model_copy(update={"seconds": seconds})
        return replace(asked, ranks=self.ranks, stop=stop)

    @property
    def end_seconds(self) -> int:
        """How long before the time limit the signal may come."""
        return self.signal_seconds + _EARLY_SECONDS


class JobSettings(FrozenModel):
    """The content of ``RUN_DIR/job.json``: what was requested, and what the job does beside running the training."""

    request: JobRequest
    verify: bool = Field(False, description="compare a few steps with those of one process first")
    check: bool = Field(False, description="check every node first, and leave out those that fail")
    container: Container | None = None


def job_request(profile: ClusterProfile, name: str, asked: Mapping[str, Any]) -> JobRequest:
    """The request for a run on a cluster.

    Args:
        profile: gives what the command line leaves out.
        name: of the job, where none is asked for; what Slurm cannot have in a name is made a blank.
        asked: fields of :class:`JobRequest` from the command line; None for those that were left out.

    Raises:
        HpctrainError: a value that Slurm would misunderstand, or that the cluster does not have.
    """
    given = {key: value for key, value in asked.items() if value is not None}
    further = given.get("sbatch", {})
    gpus = given.get("gpus_per_node", profile.node.gpus)
    tasks = given.get("tasks_per_node", gpus or 1)
    values: dict[str, Any] = {
        "name": _one_line(name),
        "tasks_per_node": tasks,
        "cpus_per_task": _cpus_per_task(profile, tasks) if "cpus_per_task" not in given else None,
        "gpus_per_node": gpus,
        "gpu_type": profile.node.gpu_type if gpus else None,
        "memory": None if not _MEMORY.isdisjoint(further) else profile.node.memory,
        "exclusive": profile.node.exclusive and "exclusive" not in further,
        **{name: getattr(profile, name) for name in JobTerms.model_fields},
        **given,
        "sbatch": {**profile.sbatch, **further},
    }
    # Values of a profile were checked with it, so that a fault is in the options.
    return validate(values, JobRequest, _option, "request", "hpctrain submit --help lists the options")


def further_options(given: list[str]) -> dict[str, str | None]:
    """The options of ``--sbatch key=value`` or ``--sbatch key``, by name."""
    options: dict[str, str | None] = {}
    for option in given:
        key, equals, value = option.removeprefix("--").partition("=")
        options[key] = value if equals else None
    return options


def _option(location: tuple[int | str, ...]) -> str:
    """The option that sets a field, for error messages."""
    field = str(location[0]) if location else ""
    return {"": "hpctrain submit", "name": "--job-name"}.get(field, f"--{field.replace('_', '-')}")


def _one_line(name: str) -> str:
    return re.sub(r"[\x00-\x1f\x7f\x85\u2028\u2029]", " ", name)[:256] or "hpctrain"


def _cpus_per_task(profile: ClusterProfile, tasks: int) -> int | None:
    """An equal share of a node's cores, in Slurm's CPUs; None where nobody said how many it has."""
    cores = profile.node.cores
    if cores is None or tasks < 1:
        return None
    # Of more ranks than cores Slurm says itself that it has no such node.
    return max(1, cores // tasks) * profile.node.threads_per_core


def container_options(
    profile: ClusterProfile, container: str | None, container_runtime: str | None, mounts: Sequence[str]
) -> dict[str, Any]:
    """The container options by name, from the command line, otherwise from the profile."""
    given = profile.container
    image = container if container is not None or given is None else given.image
    return {
        # Absolute, because the job may start in another folder.
        "container": str(Path(image).absolute()) if image is not None and Path(image).exists() else image,
        "container_runtime": container_runtime or (given.runtime if given else None),
        "mounts": [*(given.mounts if given else ()), *mounts],
    }


def host_options(profile: ClusterProfile, fabric: Path | None, node: str | None, interface: str | None) -> HostOptions:
    """Host options from the command line, with the profile's as defaults; paths are absolute, as the job reads them."""
    given = fabric or (Path(profile.fabric) if profile.fabric else None)
    node_map = node or profile.node_map
    return HostOptions(
        fabric=given.absolute() if given else None,
        node=str(Path(node_map).absolute()) if node_map and node_map != "live" else node_map,
        interface=interface or profile.interface,
    )
