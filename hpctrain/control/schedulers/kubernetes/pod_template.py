"""The pods of a run on Kubernetes: what they hold, mount and may use, and where they may be. Pure.

Fields are those of https://kubernetes.io/docs/reference/kubernetes-api/workload-resources/pod-v1/.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Any

from hpctrain.common.run.plan import Plan
from hpctrain.common.settings import POD, POD_CPUS
from hpctrain.control.schedulers.kubernetes.places import INSTANCE
from hpctrain.control.schedulers.kubernetes_profile import KubernetesProfile, Toleration, TopologyLabel
from hpctrain.control.schedulers.profile import NodeProfile
from hpctrain.control.schedulers.request import JobRequest

CONTAINER = "hpctrain"
# The folder in a pod that holds the plan and the script submitted with it.
CONFIGURATION = PurePosixPath("/etc/hpctrain")
PLAN = "plan.json"

_SHARED_MEMORY = "/dev/shm"  # noqa: S108 - the pod's own

# For the nearest label first; Kubernetes adds up the weights of all terms that a node meets.
_WEIGHTS = (100, 50, 25, 10)
# For the launcher of an MPIJob, which runs hpctrain and an mpirun.
_LAUNCHER_RESOURCES = {"cpu": "1", "memory": "2Gi"}


@dataclass(frozen=True, kw_only=True)
class PodRun:
    """A run on pods, which its manifests are made from.

    Attributes:
        name: of the job, and of what belongs to it.
        plan: the plan with which the run begins.
        request: nodes, ranks, GPUs, memory, time; a node is a pod.
        run_directory: its path as the pods see it.
        files: texts that lie beside the plan, by name.
    """

    name: str
    plan: Plan
    request: JobRequest
    node: NodeProfile
    kubernetes: KubernetesProfile
    image: str
    run_directory: PurePosixPath
    files: Mapping[str, str] = field(default_factory=dict)

    @property
    def labels(self) -> dict[str, str]:
        """The labels of everything that belongs to the run; https://kubernetes.io/docs/reference/labels-annotations-taints/."""
        return {"app.kubernetes.io/name": "hpctrain", INSTANCE: self.name}

    @property
    def cpus(self) -> int | None:
        """The processors of a pod; None where the request does not say."""
        each = self.request.cpus_per_task
        return None if each is None else each * self.request.tasks_per_node


def rank_pod(run: PodRun, *, command: Sequence[str], configured: bool = True, **of_pod: Any) -> dict[str, Any]:
    """The template of a pod that has ranks.

    Args:
        command: of its container; empty for the image's or an operator's own.
        configured: whether it mounts the plan.
    """
    cpus = {POD_CPUS.name: str(run.cpus)} if run.cpus is not None and configured else {}
    return _template(run, command, cpus, _resources(run), configured=configured, **_nearness(run), **of_pod)


def launcher_pod(run: PodRun, *, command: Sequence[str], variables: Mapping[str, str]) -> dict[str, Any]:
    """The template of the pod that starts the ranks of other pods; it needs neither GPUs nor adapters."""
    # The number of threads of a rank follows from the processors of its own pod.
    cpus = {POD_CPUS.name: str(run.cpus)} if run.cpus is not None else {}
    return _template(run, command, {**cpus, **variables}, _LAUNCHER_RESOURCES, configured=True)


def _template(
    run: PodRun,
    command: Sequence[str],
    variables: Mapping[str, str],
    resources: Mapping[str, str],
    *,
    configured: bool,
    **of_pod: Any,
) -> dict[str, Any]:
    kubernetes = run.kubernetes
    mounts, volumes = _volumes(run, configured=configured)
    variables = {POD.name: run.name, **variables} if configured else variables
    container = {
        "name": CONTAINER,
        "image": run.image,
        # Kubernetes expands $(NAME), and replaces two dollars by one.
        "command": [word.replace("$", "$$") for word in command],
        "env": [{"name": name, "value": value} for name, value in variables.items()],
        "envFrom": [{"secretRef": {"name": name}} for name in kubernetes.secrets],
        # Limits equal to requests give the pod its cores alone, so that no neighbour slows a rank.
        "resources": {"requests": dict(resources), "limits": dict(resources)} if resources else {},
        # RDMA registers memory that must stay where it is.
        "securityContext": {"capabilities": {"add": ["IPC_LOCK"]}} if kubernetes.rdma else {},
        "volumeMounts": mounts,
    }
    spec = {
        **of_pod,
        "containers": [_without_empty(container)],
        "volumes": volumes,
        "nodeSelector": dict(kubernetes.node_selector),
        "tolerations": [_toleration(each) for each in kubernetes.tolerations],
        "imagePullSecrets": [{"name": name} for name in kubernetes.pull_secrets],
        "serviceAccountName": kubernetes.service_account,
        # hpctrain does not use the Kubernetes API; a user who names an account may need its token.
        "automountServiceAccountToken": None if kubernetes.service_account else False,
        # Variables with the addresses of other services could be mistaken for settings.
        "enableServiceLinks": False,
        "securityContext": _without_empty({"runAsUser": kubernetes.user, "fsGroup": kubernetes.group}),
        # The time in which the ranks end their step and write a checkpoint.
        "terminationGracePeriodSeconds": run.request.signal_seconds,
    }
    metadata = {"labels": run.labels, "annotations": _kueue_annotations(run)}
    return {"metadata": _without_empty(metadata), "spec": _without_empty(spec)}


def _without_empty(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None and value not in ({}, [], "")}


def _resources(run: PodRun) -> dict[str, str]:
    request, rdma = run.request, run.kubernetes.rdma
    asked = {
        "cpu": None if run.cpus is None else str(run.cpus),
        "memory": memory_quantity(request.memory),
        run.kubernetes.gpu_resource: str(request.gpus_per_node) if request.gpus_per_node else None,
    }
    if rdma is not None:
        asked[rdma.resource] = str(rdma.count)
    return {name: value for name, value in asked.items() if value is not None}


def memory_quantity(memory: str | None) -> str | None:
    """Slurm's notation of memory as a quantity of Kubernetes; None where all of a node is meant, or nothing.

    Sources: https://slurm.schedmd.com/sbatch.html#OPT_mem (mebibytes where there is no unit),
    https://kubernetes.io/docs/reference/kubernetes-api/common-definitions/quantity/.
    """
    if memory is None or memory.rstrip("KMGT").strip("0") == "":
        return None
    return f"{memory}i" if memory[-1] in "KMGT" else f"{memory}Mi"


def _volumes(run: PodRun, *, configured: bool) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The mounts of a container, and the volumes of its pod."""
    mounts: list[dict[str, Any]] = []
    volumes: list[dict[str, Any]] = []
    for number, volume in enumerate(run.kubernetes.volumes):
        name = f"volume-{number}"
        mounts.append({"name": name, "mountPath": volume.path, **({"readOnly": True} if volume.read_only else {})})
        volumes.append({"name": name, "persistentVolumeClaim": {"claimName": volume.claim}})
    # NCCL and the ranks of a node need more shared memory than the 64 MB that a container has by default.
    mounts.append({"name": "shared-memory", "mountPath": _SHARED_MEMORY})
    memory = {"medium": "Memory", "sizeLimit": run.kubernetes.shared_memory}
    volumes.append({"name": "shared-memory", "emptyDir": _without_empty(memory)})
    if configured:
        mounts.append({"name": "plan", "mountPath": str(CONFIGURATION), "readOnly": True})
        volumes.append({"name": "plan", "configMap": {"name": f"{run.name}-plan"}})
    return mounts, volumes


def _toleration(toleration: Toleration) -> dict[str, Any]:
    if toleration.value is None:
        return _without_empty({"key": toleration.key, "operator": "Exists", "effect": toleration.effect})
    fields = {"key": toleration.key, "operator": "Equal", "effect": toleration.effect}
    return {**_without_empty(fields), "value": toleration.value}


def _nearness(run: PodRun) -> dict[str, Any]:
    """Where the pods with ranks may be, seen from each other.

    Kueue places all pods at once, by its own annotations; Kubernetes places one after the other.
    """
    if run.request.nodes == 1:
        return {}
    topology = () if run.kubernetes.queue else run.kubernetes.topology
    required = [_term(run, each.label) for each in topology if each.required]
    weighted = zip(topology, (*_WEIGHTS, *[1] * len(topology)), strict=False)
    preferred = [
        {"weight": weight, "podAffinityTerm": _term(run, each.label)} for each, weight in weighted if not each.required
    ]
    together = _without_empty(_when_scheduled(required, preferred))
    apart = _when_scheduled([_term(run, "kubernetes.io/hostname")], []) if run.node.exclusive else {}
    affinity = _without_empty({"podAffinity": together, "podAntiAffinity": _without_empty(apart)})
    return {"affinity": affinity} if affinity else {}


def _when_scheduled(required: list[Any], preferred: list[Any]) -> dict[str, Any]:
    return {
        "requiredDuringSchedulingIgnoredDuringExecution": required,
        "preferredDuringSchedulingIgnoredDuringExecution": preferred,
    }


def _term(run: PodRun, label: str) -> dict[str, Any]:
    return {"labelSelector": {"matchLabels": {INSTANCE: run.name}}, "topologyKey": label}


def _kueue_annotations(run: PodRun) -> dict[str, str]:
    """Source: https://kueue.sigs.k8s.io/docs/concepts/topology_aware_scheduling/."""
    topology: Sequence[TopologyLabel] = run.kubernetes.topology if run.kubernetes.queue else ()
    return {
        f"kueue.x-k8s.io/podset-{'required' if each.required else 'preferred'}-topology": each.label
        for each in topology[:1]
    }
