"""Kubernetes as a scheduler: it gets manifests, and ``kubectl`` is what follows a run and ends it."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path

from hpctrain.common.errors import HpctrainError
from hpctrain.common.run.directory import RunDirectory
from hpctrain.control.schedulers.jobs import JobState
from hpctrain.control.schedulers.kubernetes.manifests import manifest_text, manifests
from hpctrain.control.schedulers.kubernetes.places import kubectl_commands, kubectl_place
from hpctrain.control.schedulers.kubernetes.pod_template import PodRun
from hpctrain.control.schedulers.kubernetes.submission import create, prepare_pods, refuse_slurm
from hpctrain.control.schedulers.profile import ClusterProfile
from hpctrain.control.schedulers.scheduler import Cluster, Description, Order, Say, Scheduler, Submitted


class Kubernetes(Scheduler):
    """Indexed Jobs and MPIJobs. A run's directory is on a volume, and does not know of its jobs."""

    def cluster(self, profile: ClusterProfile | None, partition: str | None) -> Cluster:
        if profile is not None and profile.kubernetes is None:
            raise HpctrainError(
                "HT-profile-lacks-key",
                "the profile {profile} is for Kubernetes, and says nothing of it",
                "slurm/clusters/kubernetes.yaml has a section kubernetes to copy",
                profile=profile.name,
            )
        return super().cluster(profile, partition)

    def describe(self, order: Order, say: Say) -> Description:
        return Description(text=manifest_text(_prepared(order, say)))

    def submit(self, order: Order, say: Say) -> Submitted:
        run = _prepared(order, say)
        say(create(run))
        kind = str(manifests(run)[-1]["kind"]).lower()
        commands = kubectl_commands(kind, run.name, run.kubernetes.namespace)
        return Submitted(directory=Path(run.run_directory), jobs=(f"{kind}/{run.name}",), advice=commands)

    def list(self, jobs: Collection[str] | None, *, user: int, seconds: float) -> Sequence[JobState]:
        return ()

    def cancel(self, jobs: Sequence[str]) -> None:
        """Nothing: no run directory names a job of Kubernetes."""

    def logs(self, directory: RunDirectory, jobs: Sequence[str]) -> Sequence[Path]:
        return ()

    def advice(self, target: str) -> str | None:
        return kubectl_place(target)


def _prepared(order: Order, say: Say) -> PodRun:
    refuse_slurm(order.options)
    run, notices = prepare_pods(order)
    for line in notices:
        say(line)
    return run
