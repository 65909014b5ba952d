"""What is asked of a cluster, from the command line and its profile."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hpctrain.common.errors import HpctrainError
from hpctrain.common.run.plan import HostOptions
from hpctrain.control.schedulers.profile import ClusterProfile
from hpctrain.control.schedulers.profiles import load_profile
from hpctrain.control.schedulers.request import JobRequest, job_request
from hpctrain.control.schedulers.scheduler import DEFAULT, Cluster, scheduler


def find_cluster(name: str, partition: str | None) -> Cluster:
    """The cluster of a profile's name or file, or the one at hand for ``auto``.

    Raises:
        HpctrainError: there is no such profile, or nothing to discover.
    """
    profile = None if name == "auto" else load_profile(name)
    return scheduler(profile.scheduled_by if profile else DEFAULT).cluster(profile, partition)


def requested(cluster: Cluster, name: str, asked: Mapping[str, Any]) -> JobRequest:
    """The request for a run on a cluster, within what its partitions allow.

    Args:
        name: of the job, where none is asked for.
        asked: fields of :class:`JobRequest` from the command line.

    Raises:
        HpctrainError: a value that Slurm would misunderstand, or that is beyond a limit.
    """
    request = job_request(cluster.profile, name, asked)
    # Where none is named, a plugin of the site may choose another partition than the default one by these.
    chosen_by_site = not request.partition and (request.qos or request.constraint)
    return request if chosen_by_site else request.model_copy(update={"doubts": tuple(cluster.check(request))})


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


def host_options(
    profile: ClusterProfile, fabric: Path | None, node: str | None, interface: str | None, topology: str | None = None
) -> HostOptions:
    """Host options from the command line, with the profile's as defaults; paths are absolute, as the job reads them.

    Raises:
        HpctrainError: a topology's name without a file.
    """
    given = fabric or (Path(profile.fabric) if profile.fabric else None)
    if topology and not given:
        raise HpctrainError(
            "HT-option-needs-another",
            "--topology {topology} is one of a file",
            "name the file with --fabric",
            topology=topology,
        )
    places = node or profile.node_map
    return HostOptions(
        fabric=given.absolute() if given else None,
        topology=topology,
        node=str(Path(places).absolute()) if places and places != "live" else places,
        interface=interface or profile.interface,
    )
