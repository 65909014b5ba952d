"""The part of a cluster profile that is about Kubernetes: where pods may run, what they hold, and what they mount."""

from __future__ import annotations

from pathlib import PurePosixPath
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, model_validator

from hpctrain.common.errors import InvalidValueError
from hpctrain.common.files.checked_yaml import Section

_LABEL = r"[A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?"
_DOMAIN = r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?"


def _mount_path(path: str) -> str:
    if not path.startswith("/") or ":" in path or ".." in PurePosixPath(path).parts or path == "/":
        raise InvalidValueError(
            "HT-value-not-valid",
            "must be an absolute path without ':' and '..', and not /, but is {path!r}",
            path=path,
        )
    return path


# https://kubernetes.io/docs/concepts/overview/working-with-objects/names/ and .../labels/
ObjectName = Annotated[str, Field(pattern=r"^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$")]
Subdomain = Annotated[str, Field(pattern=rf"^{_DOMAIN}$")]
LabelKey = Annotated[str, Field(pattern=rf"^({_DOMAIN}/)?{_LABEL}$")]
LabelValue = Annotated[str, Field(pattern=rf"^({_LABEL})?$")]
ResourceName = Annotated[str, Field(pattern=rf"^{_DOMAIN}/{_LABEL}$")]
MountPath = Annotated[str, AfterValidator(_mount_path)]


class ClaimMount(Section):
    """A volume that every pod of a run mounts."""

    claim: Subdomain = Field(description="name of the PersistentVolumeClaim")
    path: MountPath = Field(description="where the pods see it")
    read_only: bool = False


class RdmaDevices(Section):
    """The network adapters of a pod, as a device plugin offers them."""

    resource: ResourceName = Field(description="as the plugin names it, such as rdma/hca or nvidia.com/rdma_shared")
    count: Annotated[int, Field(ge=1)] = 1


class TopologyLabel(Section):
    """A label of the nodes; those with the same value are near each other."""

    label: LabelKey
    required: bool = Field(False, description="whether a run waits until it can be on such nodes alone")


class Toleration(Section):
    """A taint of nodes on which the pods may run all the same."""

    key: LabelKey
    value: LabelValue | None = Field(None, description="None for any")
    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute"] | None = Field(None, description="None for any")


class KubernetesProfile(Section):
    """The settings of a Kubernetes cluster.

    Attributes:
        volumes: the run directories are in the first that is not read-only. All pods write to it.
        topology: the label of the smallest group of nodes first.
    """

    namespace: ObjectName = "default"
    image: Annotated[str, Field(pattern=r"^\S+$")] | None = Field(None, description="None: --container names it")
    volumes: Annotated[tuple[ClaimMount, ...], Field(min_length=1)]
    gpu_resource: ResourceName = "nvidia.com/gpu"
    rdma: RdmaDevices | None = None
    shared_memory: Annotated[str, Field(pattern=r"^[1-9][0-9]*[KMGT]i$")] | None = Field(
        None, description="most that /dev/shm may hold; None for as much as the pod's memory"
    )
    node_selector: dict[LabelKey, LabelValue] = Field(default_factory=dict)
    tolerations: tuple[Toleration, ...] = ()
    topology: tuple[TopologyLabel, ...] = ()
    queue: ObjectName | None = Field(None, description="of Kueue; None where Kubernetes itself places the pods")
    secrets: tuple[Subdomain, ...] = Field((), description="Secrets whose keys are variables of every pod")
    pull_secrets: tuple[Subdomain, ...] = Field((), description="Secrets by which images are fetched")
    service_account: Subdomain | None = None
    user: Annotated[int, Field(ge=0)] | None = Field(None, description="number; None for the image's")
    group: Annotated[int, Field(ge=0)] | None = Field(None, description="number that the volumes' files have")
    backoff_limit: Annotated[int, Field(ge=0)] = Field(
        6, description="how many pods may fail for a reason that hpctrain does not know"
    )
    mpi: Literal["OpenMPI", "Intel", "MPICH"] = Field("OpenMPI", description="of the image, for backends over MPI")
    ssh_path: MountPath = Field("/root/.ssh", description="where the image's user has its keys")
    sshd: tuple[str, ...] = Field((), description="the command of the MPI workers; empty for the operator's own")

    @property
    def runs(self) -> ClaimMount:
        """The volume of the run directories."""
        return next(volume for volume in self.volumes if not volume.read_only)

    @model_validator(mode="after")
    def _consistent(self) -> KubernetesProfile:
        if all(volume.read_only for volume in self.volumes):
            raise InvalidValueError(
                "HT-profile-not-valid", "volumes: none can be written to, and a run directory has to be on one"
            )
        for what in ("claim", "path"):
            values = [getattr(volume, what) for volume in self.volumes]
            if twice := [value for value in values if values.count(value) > 1]:
                raise InvalidValueError(
                    "HT-profile-not-valid", "volumes: the {kind} {name} appears twice", kind=what, name=twice[0]
                )
        return self
