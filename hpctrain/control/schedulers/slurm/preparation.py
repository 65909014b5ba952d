"""Prepares a job from the user's request and a cluster's profile, to be shown or submitted."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from hpctrain.common.cluster.container import Container
from hpctrain.common.cluster.machine import as_if_installed, installed_frameworks
from hpctrain.common.errors import HpctrainError
from hpctrain.control.launchers.launcher_choice import require_choices
from hpctrain.control.schedulers.scheduler import Order
from hpctrain.control.schedulers.slurm.batch import SETTINGS, JobSettings
from hpctrain.control.schedulers.slurm.script import render, variables
from hpctrain.control.schedulers.slurm.staging import plan_pack, plan_staging
from hpctrain.control.schedulers.slurm.submission import PreparedJob
from hpctrain.control.supervision.trackers import require_trackers


def prepare(order: Order) -> PreparedJob:
    """Prepare the job. Writes nothing, and does not ask Slurm. In a dry run a missing framework is only a notice.

    Raises:
        HpctrainError: something that is not there, or does not go together.
    """
    cluster, request, content = order.cluster, order.request, order.content
    first = next(iter(order.trainings.values()))
    container, look_only = first.start.container, first.dry_run
    if container:
        _check_container(container, first.start.launcher)
    if content.pack and content.stage_environment:
        raise HpctrainError(
            "HT-options-exclude-each-other",
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
                "HT-template-not-valid",
                "--template {template}: its job would run nothing",
                "let it call: hpctrain job {{ run_dir | quote }}",
                template=content.template,
            )
        return text

    plans = order.plans(frameworks)
    for each in plans.values():
        require_choices(each)
        if content.verify and each.ranks == 1:
            raise HpctrainError(
                "HT-ranks-too-few",
                "--verify: a job of one rank is one process already",
                "ask for more ranks, as with --nodes 2, or leave --verify out",
            )
        if not look_only:
            require_trackers(each.trackers, {**os.environ, **cluster.profile.environment})
    return PreparedJob(
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
            "HT-launcher-not-usable-here",
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
