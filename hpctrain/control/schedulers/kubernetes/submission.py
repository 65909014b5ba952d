"""Submits a run to Kubernetes: its manifests from the user's request and a cluster's profile, and kubectl."""

from __future__ import annotations

import contextlib
import re
import subprocess
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import Any

from hpctrain.common.cluster.backends import CAPABILITIES
from hpctrain.common.cluster.launcher import TORCHRUN
from hpctrain.common.cluster.machine import Machine
from hpctrain.common.cluster.programs import run_program
from hpctrain.common.errors import HpctrainError
from hpctrain.common.files.checked_yaml import dump_all
from hpctrain.common.files.regular import read_text
from hpctrain.common.files.utf8 import encodable
from hpctrain.common.recipes.requirements import has_folder, shard_folder
from hpctrain.common.recipes.schema import Recipe
from hpctrain.common.run.directory import RUNS, default_directory
from hpctrain.common.run.plan import HostOptions, Plan, Script, Slots
from hpctrain.common.run.request import FRAMEWORKS, TrainingRequest, unplaced_plan
from hpctrain.control.launchers.launcher_choice import require_choices
from hpctrain.control.planning.place_hosts import PlacedHosts
from hpctrain.control.planning.planner import place_plan
from hpctrain.control.schedulers.kubernetes.manifests import indexed_hosts, manifests, mpi_hosts
from hpctrain.control.schedulers.kubernetes.places import kubectl_commands
from hpctrain.control.schedulers.kubernetes.pod_template import CONFIGURATION, PodRun
from hpctrain.control.schedulers.kubernetes_profile import KubernetesProfile
from hpctrain.control.schedulers.request import JobRequest
from hpctrain.control.schedulers.scheduler import Order

# With an index or -launcher appended it has to be a host name of at most 63 characters.
_LONGEST_NAME = 48
# A ConfigMap holds 1 MiB, but `kubectl apply` of what --dry-run prints notes all of it in an annotation, which holds
# 256 KiB, quotes escaped: https://kubernetes.io/docs/concepts/overview/working-with-objects/annotations/.
_MOST_BYTES = 150_000
_KUBECTL_SECONDS = 120.0
_BY_HAND = "--dry-run prints the manifests, for `kubectl create -f -` where it reaches the cluster"
_NO_OPERATOR = "install mpi-operator there, or choose --backend gloo or nccl, which needs none"
# By option of Slurm: what to do on Kubernetes instead.
_INSTEAD = {
    "--account": "name a namespace in the profile",
    "--array": "submit each run separately",
    "--chain": "leave it out: a Job resumes by itself",
    "--constraint": "name the nodes' labels in the profile: node_selector",
    "--container-runtime": "leave it out: the cluster has one",
    "--dependency": "submit it when the other one is done: kubectl wait --for=condition=complete job/NAME",
    "--fabric": "name the nodes' labels in the profile: topology",
    "--launcher": "choose a --backend: torchrun starts the ranks of gloo and nccl, mpirun those of the others",
    "--mount": "name the claims in the profile: volumes",
    "--pack": "put the environment into the image",
    "--partition": "name the nodes' labels in the profile, node_selector, or a queue of Kueue",
    "--qos": "name a queue of Kueue in the profile",
    "--sbatch": "change the manifests that --dry-run prints, and apply them",
    "--stage": "put the data on a volume of the profile",
    "--stage-environment": "put it into the image",
    "--template": "change the manifests that --dry-run prints, and apply them",
    "--verify": "run hpctrain verify in a pod first",
    "--topology": "name the nodes' labels in the profile: topology",
    "--wait": "kubectl wait --for=condition=complete job/NAME; for an MPIJob --for=condition=Succeeded mpijob/NAME",
}


def refuse_slurm(options: Collection[str]) -> None:
    """Refuse options that mean nothing to Kubernetes.

    Raises:
        HpctrainError: names the option, and what to do instead.
    """
    for option, instead in _INSTEAD.items():
        if option in options:
            raise HpctrainError(
                "HT-option-not-usable-here", "{option} has no meaning on Kubernetes", instead, option=option
            )


def prepare_pods(order: Order) -> tuple[PodRun, list[str]]:
    """Prepare a run on pods, with texts for the user. Writes nothing and asks nobody.

    Its run directory is as the pods see it; by default it is on the first volume that they may write to.

    Raises:
        HpctrainError: no image, a directory or data on no volume, a script that is too large, or a backend
            that cannot run the work.
    """
    profile, request = order.cluster.profile, order.request
    (asked,) = order.trainings.values()
    kubernetes = profile.kubernetes
    assert kubernetes is not None and asked.work is not None
    title = asked.work.name if isinstance(asked.work, Recipe) else asked.work.path.name
    called = object_name(request.name if "--job-name" in order.options else default_directory(title).name)
    folder = PurePosixPath(kubernetes.runs.path, RUNS, called)
    if order.run_dir is not None:
        folder = PurePosixPath(order.run_dir)
        _require_on_volume(folder, kubernetes)
    work, files = _in_pods(asked.work, kubernetes)
    environment = {**profile.environment, **asked.start.environment}
    start = asked.start.model_copy(update={"environment": environment, "container": None})
    machine = Machine(
        host=called,
        cores=max(1, profile.node.cores or 1),
        frameworks=frozenset(FRAMEWORKS),
        versions={},
        gpus=request.gpus_per_node,
    )
    plan = _plan(request.training(replace(asked, work=work, start=start)), request, machine)
    if plan.start.passed and not kubernetes.secrets:
        raise HpctrainError(
            "HT-secret-exposed",
            "--env {variable} is a secret, and does not belong in a manifest",
            "put it into a Secret, and name that in the profile: kubernetes.secrets",
            variable=plan.start.passed[0],
        )
    image = order.image if order.image is not None else kubernetes.image
    if image is not None and (not image or re.search(r"\s", image)):
        raise HpctrainError(
            "HT-option-bad-value",
            "--container {image!r} is not the name of an image",
            "for example registry.example.org/hpctrain:0.1",
            image=image,
        )
    if image is None:
        raise HpctrainError(
            "HT-profile-lacks-key",
            "the profile {profile} names no image for the pods",
            "--container IMAGE, or kubernetes.image in it",
            profile=profile.name,
        )
    run = PodRun(
        name=called,
        plan=plan,
        request=request,
        node=profile.node,
        kubernetes=kubernetes,
        image=image,
        run_directory=folder,
        files=files,
    )
    return run, _notices(work, kubernetes)


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
    """The plan with the backend that these pods will have: it decides how their ranks find each other."""

    def planned(backend: str, launcher: str, more: HostOptions) -> Plan:
        options = asked.host_options.model_copy(update=more.model_dump(exclude_none=True))
        start = asked.start.model_copy(update={"launcher": launcher})
        return unplaced_plan(replace(asked, backend=backend, host_options=options, start=start), machine.frameworks)

    backend = asked.backend or "auto"
    nodes, slots = request.nodes, request.tasks_per_node
    if backend == "auto":
        backend = _automatic(planned("auto", "auto", HostOptions()), request, machine)
    capable = CAPABILITIES.get(backend)
    if capable and capable.joins_ranks and not capable.meets_without_mpi:
        plan = planned(backend, "mpirun", mpi_hosts())
    else:
        plan = planned(backend, TORCHRUN, indexed_hosts(machine.host, nodes, slots))
    require_choices(plan)
    # Placed on imagined hosts, because some faults show only in a plan with hosts.
    place_plan(plan, _imagined(machine, nodes, slots), machine)
    return plan


def _imagined(machine: Machine, nodes: int, slots: int) -> PlacedHosts:
    names = [machine.host, *(f"{machine.host}-{node}" for node in range(1, nodes))]
    return PlacedHosts(slots=tuple(Slots(host=name, slots=slots) for name in names))


def _automatic(plan: Plan, request: JobRequest, machine: Machine) -> str:
    """The backend of ``auto``: one that needs no operator where the training is in PyTorch and can do with it."""
    placed = place_plan(plan, _imagined(machine, request.nodes, request.tasks_per_node), machine)
    if placed.backend != "mpi" or plan.framework != "torch":
        return placed.backend
    try:
        place_plan(plan.model_copy(update={"asked_backend": "gloo"}), _imagined(machine, 1, plan.ranks), machine)
    except HpctrainError:
        return placed.backend
    return "gloo"


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
    return next((each.path for each in kubernetes.volumes if path.is_relative_to(each.path)), None)


def _require_on_volume(folder: PurePosixPath, kubernetes: KubernetesProfile) -> None:
    writable = [each.path for each in kubernetes.volumes if not each.read_only]
    if encodable(str(folder)) != str(folder):
        raise HpctrainError(
            "HT-run-directory-unfit",
            "--run-dir {folder!r} is not UTF-8, as a manifest has to be",
            "choose another one",
            folder=str(folder),
        )
    if ".." in folder.parts or not any(folder.is_relative_to(path) for path in writable):
        raise HpctrainError(
            "HT-run-directory-unfit",
            "--run-dir {folder} is on no volume that the pods share and write to",
            f"those of the profile are at {', '.join(writable)}; for example --run-dir {writable[0]}/{RUNS}/one",
            folder=folder,
        )


def _notices(work: Recipe | Script, kubernetes: KubernetesProfile) -> list[str]:
    if isinstance(work, Script) or not has_folder(work):
        return []
    folder = PurePosixPath(shard_folder(work))
    if _volume_of(folder, kubernetes):
        return []
    volumes = ", ".join(volume.path for volume in kubernetes.volumes)
    return [f"warning: data.path {folder} is on no volume of the profile ({volumes}), so the image has to have it"]


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
    if 'kind "MPIJob"' in said:
        hint = _NO_OPERATOR
    elif "AlreadyExists" in said:
        kind = str(manifests(run)[-1]["kind"]).lower()
        commands = kubectl_commands(kind, run.name, run.kubernetes.namespace)
        hint = f"choose another --job-name, or end this one first\n  {commands}"
    raise HpctrainError("HT-job-refused", "kubectl create fails: {reason}", hint, reason=said)


def _kubectl(verb: str, *, given: str) -> subprocess.CompletedProcess[str]:
    try:
        return run_program("kubectl", verb, "-f", "-", seconds=_KUBECTL_SECONDS, given=given)
    except HpctrainError as error:
        raise error.but(hint=_BY_HAND) from error
