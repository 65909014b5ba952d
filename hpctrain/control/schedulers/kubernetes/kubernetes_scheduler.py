"""Kubernetes as a scheduler: it gets manifests, and ``kubectl`` is what follows a run and ends it."""

from __future__ import annotations

import contextlib
import re
import subprocess
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import Any

from hpctrain.common.cluster.launcher import TORCHRUN
from hpctrain.common.cluster.machine import Machine
from hpctrain.common.cluster.programs import run_program
from hpctrain.common.errors import HpctrainError
from hpctrain.common.files.checked_yaml import dump_all
from hpctrain.common.files.printable import encodable
from hpctrain.common.files.regular import read_text
from hpctrain.common.recipes.schema import Recipe
from hpctrain.common.run.directory import RUNS, RunDirectory, default_directory
from hpctrain.common.run.plan import Plan, Script, Slots
from hpctrain.common.run.request import FRAMEWORKS, TrainingRequest, unplaced_plan
from hpctrain.control.launchers.launcher_choice import require_choices
from hpctrain.control.planning.place_hosts import PlacedHosts
from hpctrain.control.planning.planner import place_plan
from hpctrain.control.schedulers.job_request import JobRequest
from hpctrain.control.schedulers.jobs import JobState
from hpctrain.control.schedulers.kubernetes.manifests import (
    CONFIGURATION,
    INSTANCE,
    PodRun,
    indexed_hosts,
    manifest_text,
    manifests,
)
from hpctrain.control.schedulers.profile import KubernetesProfile
from hpctrain.control.schedulers.scheduler import Order, Say, Scheduler, Submitted

# With an index or -launcher appended it has to be a host name of at most 63 characters.
_LONGEST_NAME = 48
# A ConfigMap holds 1 MiB, but `kubectl apply` of what --dry-run prints notes all of it in an annotation, which holds
# 256 KiB, quotes escaped: https://kubernetes.io/docs/concepts/overview/working-with-objects/annotations/.
_MOST_BYTES = 150_000
_KUBECTL_SECONDS = 120.0
_BY_HAND = "--dry-run prints the manifests, for `kubectl create -f -` where it reaches the cluster"
# Options of Slurm and of its job script.
_NOT_HERE = frozenset(
    f"--{name}"
    for name in (
        *("account", "check", "constraint", "container-runtime", "dependency", "fabric", "launcher", "mount"),
        *("no-copy", "partition", "qos", "sbatch", "spare", "verify", "wait"),
    )
)


class Kubernetes(Scheduler):
    """Indexed Jobs. A run's directory is on a volume, and does not know of its jobs."""

    def describe(self, order: Order, say: Say) -> str:
        return manifest_text(prepare_pods(order))

    def submit(self, order: Order, say: Say) -> Submitted:
        run = prepare_pods(order)
        say(create(run))
        commands = kubectl_commands(run.name, run.kubernetes.namespace)
        return Submitted(directory=Path(run.run_directory), jobs=(f"job/{run.name}",), advice=commands)

    def list(self, jobs: Collection[str] | None, *, user: int, seconds: float) -> Sequence[JobState]:
        return ()

    def cancel(self, jobs: Sequence[str]) -> None:
        """Nothing: no run directory names a job of Kubernetes."""

    def logs(self, directory: RunDirectory, jobs: Sequence[str]) -> Sequence[Path]:
        return ()


def prepare_pods(order: Order) -> PodRun:
    """Prepare a run on pods. Writes nothing and asks nobody.

    Its run directory is as the pods see it; by default it is on the first volume that they may write to.

    Raises:
        HpctrainError: an option that means nothing to Kubernetes, no image, a directory on no volume, a script that is
            too large, or a backend that cannot run the work.
    """
    for option in sorted(_NOT_HERE & {*order.options}):
        raise HpctrainError(
            "HT-option-not-usable-here",
            "{option} has no meaning on Kubernetes",
            "leave it out; docs/clusters.md, Kubernetes, says what pods have in its place",
            option=option,
        )
    profile, request = order.cluster.profile, order.request
    training, kubernetes = order.training, profile.kubernetes
    assert kubernetes is not None and training.work is not None
    title = training.work.name if isinstance(training.work, Recipe) else training.work.path.name
    called = object_name(request.name if "--job-name" in order.options else default_directory(title).name)
    folder = PurePosixPath(kubernetes.runs.path, RUNS, called)
    if order.run_dir is not None:
        folder = PurePosixPath(order.run_dir)
        _require_on_volume(folder, kubernetes)
    work, files = _in_pods(training.work, kubernetes)
    environment = {**profile.environment, **training.start.environment}
    start = training.start.model_copy(update={"environment": environment, "container": None})
    machine = Machine(
        host=called,
        cores=max(1, profile.node.cores or 1),
        frameworks=frozenset(FRAMEWORKS),
        versions={},
        gpus=request.gpus_per_node,
    )
    plan = _plan(request.training(replace(training, work=work, start=start)), request, machine)
    if plan.start.passed and not kubernetes.secrets:
        raise HpctrainError(
            "HT-secret-exposed",
            "--env {variable} is a secret, and does not belong in a manifest",
            "put it into a Secret, and name that in the profile: kubernetes.secrets",
            variable=plan.start.passed[0],
        )
    image = order.image if order.image is not None else kubernetes.image
    if not image or re.search(r"\s", image):
        raise HpctrainError(
            "HT-profile-lacks-key",
            "neither --container nor the profile {profile} names an image for the pods",
            "--container registry.example.org/hpctrain:0.1, or kubernetes.image in it",
            profile=profile.name,
        )
    return PodRun(
        name=called,
        plan=plan,
        request=request,
        kubernetes=kubernetes,
        image=image,
        run_directory=folder,
        files=files,
    )


def object_name(text: str) -> str:
    """A name that Kubernetes and its DNS accept, from any text; an end that tells it from others is kept."""
    name = re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")
    if len(name) > _LONGEST_NAME:
        tail = re.search(r"(-\d{8}-\d{6})?$", name)
        end = tail[0] if tail else ""
        name = name[: _LONGEST_NAME - len(end)].rstrip("-") + end
    # The name of a service has to begin with a letter.
    return name if name[:1].isalpha() else f"run-{name}".rstrip("-")


def _plan(asked: TrainingRequest, request: JobRequest, machine: Machine) -> Plan:
    """The plan with the backend that these pods will have.

    Raises:
        HpctrainError: the backend needs an MPI to start its ranks, or cannot run the work.
    """
    nodes, slots = request.nodes, request.tasks_per_node
    names = [machine.host, *(f"{machine.host}-{node}" for node in range(1, nodes))]
    hosts = PlacedHosts(slots=tuple(Slots(host=name, slots=slots) for name in names))

    options = asked.host_options.model_copy(
        update=indexed_hosts(machine.host, nodes, slots).model_dump(exclude_none=True)
    )
    start = asked.start.model_copy(update={"launcher": TORCHRUN})
    plan = unplaced_plan(replace(asked, host_options=options, start=start), machine.frameworks)
    # Placed on imagined hosts, because some faults show only in a plan with hosts.
    backend = place_plan(plan, hosts, machine).backend
    require_choices(plan)
    return plan.model_copy(update={"asked_backend": backend})


def _in_pods(work: Recipe | Script, kubernetes: KubernetesProfile) -> tuple[Recipe | Script, dict[str, str]]:
    """The work as pods find it, and the files that they get with the plan: a script that is on no volume."""
    if isinstance(work, Recipe) or _volume_of(PurePosixPath(work.path), kubernetes):
        return work, {}
    hint = (
        f"it goes to the pods in a ConfigMap, which holds {_MOST_BYTES // 1000} kB of text; put it on a volume: "
        f"{', '.join(volume.path for volume in kubernetes.volumes)}"
    )
    text = read_text(work.path, "script", hint, limit=_MOST_BYTES)
    name = re.sub(r"[^A-Za-z0-9._-]", "-", work.path.name)
    return work.model_copy(update={"path": Path(CONFIGURATION / name)}), {name: text}


def _volume_of(path: PurePosixPath, kubernetes: KubernetesProfile) -> str | None:
    """Where the volume is mounted that a path is on."""
    return next((volume.path for volume in kubernetes.volumes if path.is_relative_to(volume.path)), None)


def _require_on_volume(folder: PurePosixPath, kubernetes: KubernetesProfile) -> None:
    writable = [volume.path for volume in kubernetes.volumes if not volume.read_only]
    named = encodable(str(folder)) == str(folder) and ".." not in folder.parts
    if not named or not any(folder.is_relative_to(path) for path in writable):
        raise HpctrainError(
            "HT-run-directory-unfit",
            "--run-dir {folder!r} is on no volume that the pods share and write to, or is not UTF-8",
            f"those of the profile are at {', '.join(writable)}; for example --run-dir {writable[0]}/{RUNS}/one",
            folder=str(folder),
        )


def kubectl_commands(name: str, namespace: str | None = None) -> str:
    """How to see a job on Kubernetes, follow it, and end it; without a namespace in the default one of kubectl."""
    where = f" -n {namespace}" if namespace else ""
    chosen = f"-l {INSTANCE}={name}{where}"
    return (
        f"see its state: kubectl get job,pods {chosen}\n"
        f"  follow it: kubectl logs -f {chosen}\n"
        f"  end it: kubectl delete job,service,configmap {chosen}"
    )


def create(run: PodRun) -> str:
    """Give the manifests to kubectl; returns what it says. A job of this name that is there already is left alone.

    Raises:
        HpctrainError: there is no kubectl, or the cluster cannot be reached or refuses.
    """
    *needed, job = manifests(run)
    said = _create(run, needed)
    try:
        return f"{said}\n{_create(run, [job])}"
    except HpctrainError:
        # Remove what was just created, so that the next try does not find it.
        with contextlib.suppress(HpctrainError):
            _kubectl("delete", given=dump_all(needed))
        raise


def _create(run: PodRun, objects: Sequence[Mapping[str, Any]]) -> str:
    # kubectl continues after an object that it could not create.
    done = _kubectl("create", given=dump_all(objects))
    if done.returncode == 0:
        return done.stdout.strip()
    said = "\n  ".join(done.stderr.strip().splitlines())
    hint = f"is it the right cluster? kubectl cluster-info; {_BY_HAND}"
    if "AlreadyExists" in said:
        commands = kubectl_commands(run.name, run.kubernetes.namespace)
        hint = f"choose another --job-name, or end this one first\n  {commands}"
    raise HpctrainError("HT-job-refused", "kubectl create fails: {reason}", hint, reason=said)


def _kubectl(verb: str, *, given: str) -> subprocess.CompletedProcess[str]:
    try:
        return run_program("kubectl", verb, "-f", "-", seconds=_KUBECTL_SECONDS, given=given)
    except HpctrainError as error:
        raise error.but(hint=_BY_HAND) from error
