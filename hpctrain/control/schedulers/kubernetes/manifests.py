"""The manifests of a run on Kubernetes, from its plan. Pure.

Ranks that find each other without MPI are in the pods of an Indexed Job, whose names a headless service gives an
address; each pod starts its own. The others are in the workers of an MPIJob, whose launcher starts them by ssh.

Sources: https://kubernetes.io/docs/reference/kubernetes-api/workload-resources/job-v1/, and of mpi-operator
https://github.com/kubeflow/mpi-operator (``pkg/apis/kubeflow/v2beta1``).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hpctrain.common.cluster.launcher import TORCHRUN
from hpctrain.common.files.checked_yaml import dump_all
from hpctrain.common.run.directory import plan_text
from hpctrain.common.run.plan import HostOptions
from hpctrain.common.run.stopping import RESUMABLE
from hpctrain.control.schedulers.kubernetes.places import INSTANCE
from hpctrain.control.schedulers.kubernetes.pod_template import (
    CONFIGURATION,
    CONTAINER,
    PLAN,
    PodRun,
    launcher_pod,
    rank_pod,
)
from hpctrain.control.schedulers.times import slurm_seconds

MPI_HOSTFILE = Path("/etc/mpi/hostfile")
# Exit codes of a failed run, of wrong use, and of a check that refused.
_FINAL = (1, 2, 3)


def indexed_hosts(name: str, nodes: int, slots: int) -> HostOptions:
    """The pods of an Indexed Job as the hosts of a plan: ``NAME-0.NAME`` and so on, of the job and its service."""
    return HostOptions(hosts=f"{name}-{0 if nodes == 1 else f'[0-{nodes - 1}]'}.{name}:{slots}")


def mpi_hosts() -> HostOptions:
    """The workers of an MPIJob as the hosts of a plan: those of the operator's hostfile."""
    return HostOptions(hostfile=MPI_HOSTFILE)


def manifests(run: PodRun) -> list[dict[str, Any]]:
    """The objects of a run, in the order in which they are made."""
    if run.plan.start.launcher == TORCHRUN:
        return [_plan(run), _service(run), _indexed_job(run)]
    return [_plan(run), _mpi_job(run)]


def manifest_text(run: PodRun) -> str:
    """The manifests as YAML, for ``kubectl create``."""
    return dump_all(manifests(run))


def _metadata(run: PodRun, name: str, **labels: str) -> dict[str, Any]:
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
        "template": rank_pod(run, command=_command(run), restartPolicy="Never", subdomain=run.name),
    }
    return {"apiVersion": "batch/v1", "kind": "Job", "metadata": _job_metadata(run), "spec": spec}


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


def _mpi_job(run: PodRun) -> dict[str, Any]:
    kubernetes = run.kubernetes
    launcher = launcher_pod(
        run,
        command=_command(run),
        # The operator sets this only for Open MPI 4.
        variables={"PRTE_MCA_prte_keep_fqdn_hostnames": "true"} if kubernetes.mpi == "OpenMPI" else {},
    )
    worker = rank_pod(run, command=kubernetes.sshd, configured=False)
    spec = {
        "slotsPerWorker": run.request.tasks_per_node,
        "mpiImplementation": kubernetes.mpi,
        "sshAuthMountPath": kubernetes.ssh_path,
        "launcherCreationPolicy": "WaitForWorkersReady",
        # MPIJob has no rules for exit codes: every failure counts, and a restarted run resumes where it can.
        "runPolicy": {"cleanPodPolicy": "Running", **_limits(run)},
        "mpiReplicaSpecs": {
            "Launcher": {"replicas": 1, "restartPolicy": "Never", "template": launcher},
            # A worker runs sshd, which ends only when its container is killed.
            "Worker": {"replicas": run.request.nodes, "restartPolicy": "OnFailure", "template": worker},
        },
    }
    return {"apiVersion": "kubeflow.org/v2beta1", "kind": "MPIJob", "metadata": _job_metadata(run), "spec": spec}


def _job_metadata(run: PodRun) -> dict[str, Any]:
    queue = {"kueue.x-k8s.io/queue-name": run.kubernetes.queue} if run.kubernetes.queue else {}
    return _metadata(run, run.name, **queue)


def _limits(run: PodRun) -> dict[str, int]:
    seconds = None if run.request.time is None else slurm_seconds(run.request.time)
    # 0 is no limit.
    deadline = {"activeDeadlineSeconds": seconds} if seconds else {}
    return {"backoffLimit": run.kubernetes.backoff_limit, **deadline}


def _command(run: PodRun) -> list[str]:
    """The command of each pod, which also resumes the run when a pod is started again."""
    return ["hpctrain", "run", "--resume", f"--run-dir={run.run_directory}", f"--plan={CONFIGURATION / PLAN}"]
