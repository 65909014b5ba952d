"""``hpctrain submit`` to Kubernetes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpctrain.cli.host_options import JobHosts
from hpctrain.cli.run_options import JobStart, WorkOptions
from hpctrain.cli.submit_options import ScriptOptions
from hpctrain.cli.work import read_work
from hpctrain.common.run.plan import Start, Stop
from hpctrain.common.run.request import TrainingRequest
from hpctrain.control.schedulers.kubernetes.manifests import manifest_text, manifests
from hpctrain.control.schedulers.kubernetes.submission import create, prepare_pods, refuse_slurm
from hpctrain.control.schedulers.places import kubectl_commands
from hpctrain.control.schedulers.preparation import host_options
from hpctrain.control.schedulers.profile import ClusterProfile
from hpctrain.control.schedulers.request import JobRequest
from hpctrain.report.output import answer, tell


@dataclass(frozen=True, kw_only=True)
class PodSubmission:
    """The options of ``submit`` that mean the same to Slurm and to Kubernetes; ``asked`` are those about the job."""

    profile: ClusterProfile
    request: JobRequest
    work: str
    arguments: Sequence[str]
    training: WorkOptions
    asked: Mapping[str, Any]
    run_dir: Path | None
    restarts: int | None


def submit_pods(
    given: PodSubmission, start: JobStart, hosts: JobHosts, script: ScriptOptions, *, dry_run: bool, wait: bool
) -> None:
    """Print the manifests, or give them to kubectl.

    Raises:
        HpctrainError: an option is for Slurm alone, the manifests cannot be made, or kubectl refuses them.
    """
    refuse_slurm(
        given.asked,
        {
            "--container-runtime": bool(start.container_runtime),
            "--fabric": bool(hosts.fabric),
            "--launcher": bool(start.launcher),
            "--mount": bool(start.mounts),
            "--pack": script.pack,
            "--stage": bool(script.stage),
            "--stage-environment": bool(script.stage_environment),
            "--template": bool(script.template),
            "--topology": bool(hosts.topology),
            "--verify": script.verify,
            "--wait": wait,
        },
    )
    changes = start.changes()
    changes.pop("container", None)
    training = given.training
    work = read_work(given.work, training, given.arguments)
    asked = TrainingRequest(
        work=work,
        backend=training.backend,
        framework=training.framework,
        host_options=host_options(given.profile, None, hosts.node, hosts.interface),
        start=Start(**changes),
        stop=Stop(restarts=given.restarts),
        run_dir=given.run_dir,
    )
    run, job = prepare_pods(
        given.profile,
        given.request,
        asked,
        name=given.asked.get("name"),
        image=start.container,
    )
    for line in job.notices:
        tell(line)
    if dry_run:
        answer(manifest_text(run), end="")
        return
    tell(create(run))
    kind = str(manifests(run)[-1]["kind"]).lower()
    answer(run.run_directory)
    answer(f"{kind}/{run.name}")
    tell(kubectl_commands(kind, run.name, run.kubernetes.namespace))
