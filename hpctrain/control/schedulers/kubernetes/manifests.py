"""The manifests of a run on Kubernetes, from its plan. Pure.

Ranks are in the pods of an Indexed Job, whose names a headless service gives an address; each pod starts its own.

Sources: https://kubernetes.io/docs/reference/kubernetes-api/workload-resources/job-v1/, .../pod-v1/.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Any

from hpctrain.common.files.checked_yaml import dump_all
from hpctrain.common.run.directory import plan_text
from hpctrain.common.run.plan import HostOptions, Plan
from hpctrain.common.run.stopping import RESUMABLE
from hpctrain.common.settings import POD, POD_CPUS
from hpctrain.control.schedulers.job_request import JobRequest
from hpctrain.control.schedulers.jobs import slurm_seconds
from hpctrain.control.schedulers.profile import KubernetesProfile

CONTAINER = "hpctrain"
# The folder in a pod that holds the plan and the script submitted with it.
CONFIGURATION = PurePosixPath("/etc/hpctrain")
PLAN = "plan.json"
# https://kubernetes.io/docs/reference/labels-annotations-taints/#app-kubernetes-io-instance
INSTANCE = "app.kubernetes.io/instance"

_SHARED_MEMORY = "/dev/shm"  # noqa: S108 - the pod's own
# Exit codes of a failed run, of wrong use, and of a check that refused.
_FINAL = (1, 2, 3)


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
    kubernetes: KubernetesProfile
    image: str
    run_directory: PurePosixPath
    files: Mapping[str, str] = field(default_factory=dict)

    @property
    def labels(self) -> dict[str, str]:
        """The labels of everything that belongs to the run."""
        return {"app.kubernetes.io/name": "hpctrain", INSTANCE: self.name}

    @property
    def cpus(self) -> int | None:
        """The processors of a pod; None where the request does not say."""
        cpus = self.request.cpus_per_task
        return None if cpus is None else cpus * self.request.tasks_per_node


def indexed_hosts(name: str, nodes: int, slots: int) -> HostOptions:
    """The pods of an Indexed Job as the hosts of a plan: ``NAME-0.NAME`` and so on, of the job and its service."""
    return HostOptions(hosts=f"{name}-{0 if nodes == 1 else f'[0-{nodes - 1}]'}.{name}:{slots}")


def manifests(run: PodRun) -> list[dict[str, Any]]:
    """The objects of a run, in the order in which they are made."""
    return [_plan(run), _service(run), _indexed_job(run)]


def manifest_text(run: PodRun) -> str:
    """The manifests as YAML, for ``kubectl create``."""
    return dump_all(manifests(run))


def _metadata(run: PodRun, name: str, labels: Mapping[str, str] = {}) -> dict[str, Any]:
    return {"name": name, "namespace": run.kubernetes.namespace, "labels": {**run.labels, **labels}}


def _plan(run: PodRun) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": _metadata(run, f"{run.name}-plan"),
        "immutable": True,
        "data": {PLAN: plan_text(run.plan).decode(), **run.files},
    }


def _service(run: PodRun) -> dict[str, Any]:
    """The addresses of the pods, each from when its container runs: the first pod waits for those of the others."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": _metadata(run, run.name),
        "spec": {"clusterIP": "None", "selector": {INSTANCE: run.name}},
    }


def _indexed_job(run: PodRun) -> dict[str, Any]:
    pods = run.request.nodes
    spec = {
        "completionMode": "Indexed",
        "completions": pods,
        "parallelism": pods,
        **_limits(run),
        # Two pods of one number would be two launchers of a run.
        "podReplacementPolicy": "Failed",
        "podFailurePolicy": {"rules": _failure_rules()},
        "template": _template(run),
    }
    metadata = _metadata(run, run.name, run.kubernetes.labels)
    return {"apiVersion": "batch/v1", "kind": "Job", "metadata": metadata, "spec": spec}


def _failure_rules() -> list[dict[str, Any]]:
    """The rules for a pod's end, of which the first that fits counts; other ends count towards the backoff limit.

    Source: https://kubernetes.io/docs/concepts/workloads/controllers/job/#pod-failure-policy.
    """
    return [
        # A pod that was preempted, evicted or drained is created again.
        {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
        # A run that stopped in good order resumes from its checkpoint; hpctrain itself ends one without progress.
        {"action": "Ignore", "onExitCodes": _exit_codes(RESUMABLE)},
        {"action": "FailJob", "onExitCodes": _exit_codes(*_FINAL)},
    ]


def _exit_codes(*codes: int) -> dict[str, Any]:
    return {"containerName": CONTAINER, "operator": "In", "values": list(codes)}


def _limits(run: PodRun) -> dict[str, int]:
    seconds = None if run.request.time is None else slurm_seconds(run.request.time)
    # 0 is no limit.
    deadline = {"activeDeadlineSeconds": seconds} if seconds else {}
    return {"backoffLimit": run.kubernetes.backoff_limit, **deadline}


def _template(run: PodRun) -> dict[str, Any]:
    """The template of the pods. Their command also resumes the run when a pod is started again."""
    command = ["hpctrain", "run", "--resume", f"--run-dir={run.run_directory}", f"--plan={CONFIGURATION / PLAN}"]
    variables = {POD.name: run.name, **({POD_CPUS.name: str(run.cpus)} if run.cpus is not None else {})}
    resources = _resources(run)
    kubernetes = run.kubernetes
    mounts, volumes = _volumes(run)
    container = {
        "name": CONTAINER,
        "image": run.image,
        # Kubernetes expands $(NAME), and replaces two dollars by one.
        "command": [word.replace("$", "$$") for word in command],
        "env": [{"name": name, "value": value} for name, value in variables.items()],
        "envFrom": [{"secretRef": {"name": name}} for name in kubernetes.secrets],
        # Limits equal to requests give the pod its cores alone, so that no neighbour slows a rank.
        "resources": {"requests": resources, "limits": dict(resources)} if resources else {},
        # RDMA registers memory that must stay where it is.
        "securityContext": {"capabilities": {"add": ["IPC_LOCK"]}} if kubernetes.rdma else {},
        "volumeMounts": mounts,
    }
    spec = {
        "restartPolicy": "Never",
        "subdomain": run.name,
        "containers": [_without_empty(container)],
        "volumes": volumes,
        # hpctrain does not use the Kubernetes API.
        "automountServiceAccountToken": False,
        # Variables with the addresses of other services could be mistaken for settings.
        "enableServiceLinks": False,
        # The time in which the ranks end their step and write a checkpoint.
        "terminationGracePeriodSeconds": run.request.signal_seconds,
        **kubernetes.pod,
    }
    return {"metadata": {"labels": run.labels}, "spec": spec}


def _without_empty(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None and value not in ({}, [])}


def _resources(run: PodRun) -> dict[str, str]:
    request, rdma = run.request, run.kubernetes.rdma
    wanted = {
        "cpu": None if run.cpus is None else str(run.cpus),
        "memory": memory_quantity(request.memory),
        run.kubernetes.gpu_resource: str(request.gpus_per_node) if request.gpus_per_node else None,
        **({rdma.resource: str(rdma.count)} if rdma else {}),
    }
    return {name: value for name, value in wanted.items() if value is not None}


def memory_quantity(memory: str | None) -> str | None:
    """Slurm's notation of memory as a quantity of Kubernetes; None where all of a node is meant, or nothing.

    Sources: https://slurm.schedmd.com/sbatch.html#OPT_mem (mebibytes where there is no unit),
    https://kubernetes.io/docs/reference/kubernetes-api/common-definitions/quantity/.
    """
    if memory is None or memory.rstrip("KMGT").strip("0") == "":
        return None
    return f"{memory}i" if memory[-1] in "KMGT" else f"{memory}Mi"


def _volumes(run: PodRun) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
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
    mounts.append({"name": "plan", "mountPath": str(CONFIGURATION), "readOnly": True})
    volumes.append({"name": "plan", "configMap": {"name": f"{run.name}-plan"}})
    return mounts, volumes
