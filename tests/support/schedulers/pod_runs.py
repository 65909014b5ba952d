"""The manifests that a person can read in tests/golden/kubernetes, and how each is made."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hpctrain.common.recipes.load import load_recipe
from hpctrain.common.recipes.schema import Recipe
from hpctrain.common.run.plan import Script, Start
from hpctrain.common.run.request import TrainingRequest
from hpctrain.control.schedulers.job_request import job_request
from hpctrain.control.schedulers.kubernetes.kubernetes_scheduler import prepare_pods
from hpctrain.control.schedulers.kubernetes.manifests import PodRun
from hpctrain.control.schedulers.kubernetes_profile import ClaimMount, KubernetesProfile, RdmaDevices
from hpctrain.control.schedulers.profile import ClusterProfile, NodeProfile
from hpctrain.control.schedulers.scheduler import Cluster, Order

VOLUME = ClaimMount(claim="runs", path="/runs")
PLAIN = ClusterProfile(name="plain", source="the tests", kubernetes=KubernetesProfile(volumes=(VOLUME,)))
GPUS = ClusterProfile(
    name="gpus",
    source="the tests",
    node=NodeProfile(gpus=8, cores=48, threads_per_core=2, memory="900G", exclusive=True),
    time="24:00:00",
    environment={"NCCL_DEBUG": "WARN", "MOTTO": 'it\'s $HOME: "y"\n- yes'},
    signal_seconds=300,
    kubernetes=KubernetesProfile(
        namespace="training",
        image="registry.example.org/hpctrain:0.1",
        volumes=(ClaimMount(claim="imagenet", path="/data", read_only=True), VOLUME),
        rdma=RdmaDevices(resource="rdma/hca", count=8),
        shared_memory="64Gi",
        pod={
            "nodeSelector": {"node-pool": "h100", "y": "n"},
            "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists"}],
            "imagePullSecrets": [{"name": "registry"}],
            "securityContext": {"runAsUser": 1000, "fsGroup": 1000},
        },
        secrets=("tokens",),
        ssh_path="/home/mpiuser/.ssh",
        sshd=("/usr/sbin/sshd", "-De", "-f", "/home/mpiuser/.sshd_config"),
    ),
)


def of_kubernetes(profile: ClusterProfile, **changes: Any) -> ClusterProfile:
    """The profile with other values of its part about Kubernetes."""
    assert profile.kubernetes is not None
    return profile.model_copy(update={"kubernetes": profile.kubernetes.model_copy(update=changes)})


def pod_run(
    profile: ClusterProfile = PLAIN,
    work: Recipe | Script | None = None,
    *,
    backend: str = "auto",
    framework: str | None = None,
    start: Start = Start(),
    run_directory: Path | None = None,
    **asked: Any,
) -> PodRun:
    """A run on a cluster; ``asked`` are options about the job."""
    request = job_request(profile, "digits", asked)
    training = TrainingRequest(
        work=load_recipe("digits", []) if work is None else work, framework=framework, backend=backend, start=start
    )
    order = Order(
        cluster=Cluster(profile=profile),
        request=request,
        trainings={None: training},
        options={"--job-name"},
        image=None if profile.kubernetes and profile.kubernetes.image else "hpctrain:test",
        run_dir=run_directory,
    )
    return prepare_pods(order)


CASES = {
    "gloo-1": pod_run(nodes=1, tasks_per_node=2),
    "gloo-4": pod_run(nodes=4, tasks_per_node=2),
    "nccl-4": pod_run(GPUS, nodes=4),
    "nccl-kueue-4": pod_run(of_kubernetes(GPUS, labels={"kueue.x-k8s.io/queue-name": "training"}), nodes=4, time="0"),
    "mpi-4": pod_run(nodes=4, tasks_per_node=2, backend="mpi"),
    "horovod-4": pod_run(GPUS, nodes=4, framework="keras"),
    "single": pod_run(),
}
