"""Prepares a job from the user's request and a cluster's profile, to be shown or submitted."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hpctrain.common.cluster.container import Container
from hpctrain.common.cluster.machine import as_if_installed, installed_frameworks
from hpctrain.common.errors import HpctrainError
from hpctrain.common.run.plan import HostOptions
from hpctrain.common.run.request import TrainingRequest, unplaced_plan
from hpctrain.control.launchers.launcher_choice import require_choices
from hpctrain.control.schedulers.profile import ClusterProfile
from hpctrain.control.schedulers.profiles import load_profile
from hpctrain.control.schedulers.request import JobRequest, job_request
from hpctrain.control.schedulers.slurm.batch import SETTINGS, JobSettings
from hpctrain.control.schedulers.slurm.limits import Limits, check_limits
from hpctrain.control.schedulers.slurm.script import render, variables
from hpctrain.control.schedulers.slurm.submission import PreparedJob
from hpctrain.control.schedulers.staging import plan_pack, plan_staging
from hpctrain.control.supervision.trackers import require_trackers


@dataclass(frozen=True, kw_only=True)
class ScriptContent:
    """What the job does before the ranks start, and its script's template.

    Attributes:
        stage: files and folders that each node gets a copy of.
        stage_environment: a Python environment that each node gets a copy of.
        pack: each node gets an archive of this environment.
        template: a user's own template of the job script.
        verify: a few steps are compared with those of one process before the run begins.
    """

    stage: Sequence[Path] = ()
    stage_environment: Path | None = None
    pack: bool = False
    template: Path | None = None
    verify: bool = False


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """A profile, and what its partitions allow a job where Slurm is there to say so. For a discovered one also what was
    found, and files for the run directory by name.
    """

    profile: ClusterProfile
    findings: tuple[str, ...] = ()
    limits: tuple[Limits, ...] = ()
    files: Mapping[str, str] = field(default_factory=dict)


def find_cluster(name: str, partition: str | None) -> Cluster:
    """The cluster of a profile's name or file, or the one at hand for ``auto``.

    Raises:
        HpctrainError: there is no such profile, or nothing to discover.
    """
    from hpctrain.control.schedulers.slurm.discover import discover, known_limits, profile_yaml

    if name != "auto":
        profile = load_profile(name)
        limits = () if profile.kubernetes else known_limits(partition or profile.partition)
        return Cluster(profile=profile, limits=limits)
    found = discover(partition)
    return Cluster(
        # The limit of its nodes is left out, because it is among the limits, which a QOS can lift.
        profile=found.profile.model_copy(update={"max_nodes": None}),
        findings=found.findings,
        limits=found.limits,
        files={"cluster.yaml": profile_yaml(found.profile)},
    )


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
    if not cluster.limits or chosen_by_site:
        return request
    return request.model_copy(update={"doubts": tuple(check_limits(request, cluster.limits))})


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
            "HT-topology-name-without-file",
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


def prepare(
    cluster: Cluster,
    request: JobRequest,
    trainings: Mapping[int | None, TrainingRequest],
    content: ScriptContent = ScriptContent(),
) -> PreparedJob:
    """Prepare the job. Writes nothing, and does not ask Slurm. In a dry run a missing framework is only a notice.

    Args:
        trainings: of each task of an array by its number; of any other run, under None. They differ in their work only.

    Raises:
        HpctrainError: something that is not there, or does not go together.
    """
    first = next(iter(trainings.values()))
    container, look_only = first.start.container, first.dry_run
    if container:
        _check_container(container, first.start.launcher)
    if content.pack and content.stage_environment:
        raise HpctrainError(
            "HT-pack-with-stage-environment",
            "--pack and --stage-environment exclude each other",
            "--pack packs this environment",
        )
    packed, placed = plan_pack(cluster.profile, container) if content.pack else (None, None)
    settings = JobSettings(
        array=request.array is not None,
        chain=request.chain > 1,
        requeue=request.requeue,
        signal=request.signal,
        cpus_per_task=request.cpus_per_task,
        environment=cluster.profile.environment,
        verify=content.verify,
        container=container,
        staging=plan_staging(cluster.profile, content.stage, content.stage_environment, container),
        pack=placed,
    )
    folder = Path.cwd()
    frameworks, missing = installed_frameworks(), tuple[str, ...]()
    if look_only and container is None:
        frameworks, missing = as_if_installed(frameworks)

    def script(directory: Path) -> str:
        no_kill = any(each.fault_tolerant or each.elastic for each in plans.values())
        values = variables(
            request,
            cluster.profile,
            run_directory=directory,
            folder=folder,
            virtual_environment=_virtual_environment(),
            no_kill=no_kill,
        )
        text = render(values, content.template)
        if "hpctrain job" not in text:
            raise HpctrainError(
                "HT-template-without-job",
                "--template {template}: its job would run nothing",
                "let it call: hpctrain job {{ run_dir | quote }}",
                template=content.template,
            )
        return text

    plans = {task: unplaced_plan(request.training(each), frameworks) for task, each in trainings.items()}
    for each in plans.values():
        require_choices(each)
        if content.verify and each.ranks == 1:
            raise HpctrainError(
                "HT-verify-job-of-one-rank",
                "--verify: a job of one rank is one process already",
                "ask for more ranks, as with --nodes 2, or leave --verify out",
            )
        if not look_only:
            require_trackers(each.trackers, {**os.environ, **cluster.profile.environment})
    return PreparedJob(
        profile=cluster.profile,
        request=request,
        plans=plans,
        render=script,
        files={**cluster.files, SETTINGS: f"{settings.model_dump_json(indent=2, exclude_defaults=True)}\n"},
        pack=packed,
        notices=(
            *cluster.findings,
            *request.doubts,
            *filter(None, [request.warning]),
            *(f"warning: {each}" for each in missing),
        ),
    )


def _check_container(container: Container, launcher: str) -> None:
    image = container.image
    if container.runtime == "pyxis" and launcher == "mpirun":
        raise HpctrainError(
            "HT-container-pyxis-without-srun",
            "pyxis is a plugin of srun: mpirun cannot start its containers",
            "--launcher srun-pmix",
        )
    # Pyxis also accepts a name without a registry.
    named = container.runtime == "pyxis" and not image.startswith((".", "/")) and not image.endswith((".sif", ".sqsh"))
    if not (named or "://" in image or "#" in image or Path(image).exists()):
        raise HpctrainError(
            "HT-container-image-missing",
            "--container {image}: there is no such file, and it is not an address",
            f"looked for {Path(image).absolute()}; an address is like docker://python:3.12",
            image=image,
        )


def _virtual_environment() -> Path | None:
    """The virtual environment that this hpctrain is installed in; None without one."""
    here = Path(sys.prefix)
    return here if sys.prefix != sys.base_prefix and (here / "bin" / "activate").exists() else None
