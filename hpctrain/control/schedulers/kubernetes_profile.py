"""The part of a cluster profile that is about Kubernetes: where pods may run, what they hold, and what they mount."""

from __future__ import annotations

from pathlib import PurePosixPath
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, model_validator

from hpctrain.common.errors import InvalidValueError
from hpctrain.common.files.checked_yaml import Section

# Fields of a pod's spec that hpctrain sets itself.
_SET_ELSEWHERE = frozenset(("containers", "volumes", "restartPolicy", "subdomain", "terminationGracePeriodSeconds"))


def _mount_path(path: str) -> str:
    if not path.startswith("/") or ":" in path or ".." in PurePosixPath(path).parts or path == "/":
        raise InvalidValueError(
            "HT-value-not-valid",
            "must be an absolute path without ':' and '..', and not /, but is {path!r}",
            path=path,
        )
    return path


# https://kubernetes.io/docs/concepts/overview/working-with-objects/names/ and .../labels/
ObjectName = Annotated[str, Field(pattern=r"^[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?$")]
LabelKey = Annotated[str, Field(pattern=r"^[A-Za-z0-9]([A-Za-z0-9_./-]{0,315}[A-Za-z0-9])?$")]
LabelValue = Annotated[str, Field(pattern=r"^([A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?)?$")]
MountPath = Annotated[str, AfterValidator(_mount_path)]


class ClaimMount(Section):
    """A volume that every pod of a run mounts."""

    claim: ObjectName = Field(description="name of the PersistentVolumeClaim")
    path: MountPath = Field(description="where the pods see it")
    read_only: bool = False


class RdmaDevices(Section):
    """The network adapters of a pod, as a device plugin offers them."""

    resource: LabelKey = Field(description="as the plugin names it, such as rdma/hca or nvidia.com/rdma_shared")
    count: Annotated[int, Field(ge=1)] = 1


class KubernetesProfile(Section):
    """The settings of a Kubernetes cluster.

    Attributes:
        volumes: the run directories are in the first that is not read-only. All pods write to it.
    """

    namespace: ObjectName = "default"
    image: Annotated[str, Field(pattern=r"^\S+$")] | None = Field(None, description="None: --container names it")
    volumes: Annotated[tuple[ClaimMount, ...], Field(min_length=1)]
    gpu_resource: LabelKey = "nvidia.com/gpu"
    rdma: RdmaDevices | None = None
    shared_memory: Annotated[str, Field(pattern=r"^[1-9][0-9]*[KMGT]i$")] | None = Field(
        None, description="most that /dev/shm may hold; None for as much as the pod's memory"
    )
    secrets: tuple[ObjectName, ...] = Field((), description="Secrets whose keys are variables of every pod")
    labels: dict[LabelKey, LabelValue] = Field(
        default_factory=dict, description="of the job, such as kueue.x-k8s.io/queue-name"
    )
    pod: dict[str, Any] = Field(
        default_factory=dict, description="further fields of every pod's spec, as Kubernetes names them"
    )
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
        if clash := sorted(_SET_ELSEWHERE & self.pod.keys()):
            raise InvalidValueError("HT-profile-not-valid", "pod: {fields} is set by hpctrain", fields=", ".join(clash))
        return self
