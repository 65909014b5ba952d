"""Prepares jobs from a request and a cluster's profile, renders their scripts, and submits them by ``sbatch``."""

from __future__ import annotations

import contextlib
import os
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from hpctrain.common.cluster.machine import as_if_installed, installed_frameworks
from hpctrain.common.cluster.programs import run_program
from hpctrain.common.errors import HpctrainError
from hpctrain.common.extras import require_trackers
from hpctrain.common.files.printable import encodable
from hpctrain.common.files.whole import write_whole
from hpctrain.common.run.directory import RunDirectory
from hpctrain.common.run.plan import Plan
from hpctrain.control.launchers.launcher_choice import require_choices, require_image
from hpctrain.control.schedulers.job_request import SETTINGS, JobRequest, JobSettings
from hpctrain.control.schedulers.job_script import render
from hpctrain.control.schedulers.profile import ClusterProfile
from hpctrain.control.schedulers.scheduler import Order
from hpctrain.control.schedulers.slurm.queue import jobs_of_user
from hpctrain.control.schedulers.submission import made_run, record, run_path

# Without a controller sbatch tries about this long before it fails.
_SECONDS = 120.0
# What a directive needs no quotes for.
_PLAIN = re.compile(r"[\w@%+=:,./\[\]*|&()!~^-]+", re.ASCII)


@dataclass(frozen=True, kw_only=True)
class PreparedJob:
    """Everything that a submission consists of.

    Attributes:
        render: the absolute path of a run directory to the text of the job script.
        files: further ones for the run directory, by name.
        notices: texts for the user, before submission.
    """

    plan: Plan
    render: Callable[[Path], str]
    files: Mapping[str, str]
    notices: tuple[str, ...]


def prepare(order: Order) -> PreparedJob:
    """Prepare the job. Writes nothing, and does not ask Slurm. In a dry run a missing framework is only a notice.

    Raises:
        HpctrainError: something that is not there, or does not go together.
    """
    profile, request = order.cluster.profile, order.request
    start, look_only = order.training.start, order.training.dry_run
    container = start.container
    if container and container.runtime == "pyxis" and start.launcher == "mpirun":
        raise HpctrainError(
            "HT-launcher-not-usable-here",
            "pyxis is a plugin of srun: mpirun cannot start its containers",
            "--launcher srun-pmix",
        )
    require_image(container)
    settings = JobSettings(
        request=request,
        verify=order.verify,
        check=order.check or request.spare > 0,
        container=container,
    )
    frameworks, missing = installed_frameworks(), tuple[str, ...]()
    if look_only and container is None:
        frameworks, missing = as_if_installed(frameworks)
    plan = order.plan(frameworks)
    require_choices(plan)
    if not look_only:
        require_trackers(plan.trackers, {**os.environ, **profile.environment})
    script = partial(
        job_script,
        request,
        profile,
        folder=Path.cwd(),
        virtual_environment=_virtual_environment(),
        no_kill=plan.fault_tolerant,
    )
    return PreparedJob(
        plan=plan,
        render=lambda directory: script(run_directory=directory),
        files={SETTINGS: f"{settings.model_dump_json(indent=2, exclude_defaults=True)}\n"},
        notices=(*order.cluster.findings, *(f"warning: {text}" for text in missing)),
    )


def _virtual_environment() -> Path | None:
    """The virtual environment that this hpctrain is installed in; None without one."""
    here = Path(sys.prefix)
    return here if sys.prefix != sys.base_prefix and (here / "bin" / "activate").exists() else None


def submit_job(order: Order, job: PreparedJob) -> tuple[RunDirectory, str]:
    """Make the run directory and submit; returns the directory and the job's number.

    Raises:
        HpctrainError: the directory holds a run or cannot be written, or sbatch refuses; nothing is left behind.
    """
    require_log_path(run_path(order, job.plan))
    number = None
    with made_run(order, job.plan, job.files) as directory:
        try:
            write_whole(directory.script, job.render(directory.path).encode(), private=True)
            # Executable, so that the user can run it within an allocation.
            directory.script.chmod(0o700)
            number = _sbatch(directory, order.request.dependency)
            record(directory, order, [number])
        except BaseException:
            _cancel(directory, number)
            raise
    return directory, number


def _cancel(directory: RunDirectory, number: str | None) -> None:
    """Cancel a directory's job, also one that Slurm accepted although sbatch failed, as after a socket's timeout."""
    numbers = {number} if number else set()
    # What fails here must not hide why.
    with contextlib.suppress(HpctrainError):
        for job in jobs_of_user(os.getuid()):
            if job.live and job.command.strip() == str(directory.script):
                numbers.add(job.id)
    with contextlib.suppress(HpctrainError):
        if numbers:
            run_program("scancel", *sorted(numbers, key=int), seconds=_SECONDS)


def require_log_path(directory: Path) -> None:
    """Refuse a directory where Slurm (22.05) could not write a job's log, as it interprets % and backslashes.

    Raises:
        HpctrainError: its path has one of them, or is not UTF-8, as job scripts are.
    """
    text = str(directory)
    if encodable(text) != text or "%" in text or "\\" in text:
        raise HpctrainError(
            "HT-run-directory-unfit",
            "{directory!r}: Slurm writes no log to a path with % or \\, or one that is not UTF-8",
            "choose another one with --run-dir",
            directory=text,
        )


def _sbatch(directory: RunDirectory, dependency: str | None) -> str:
    options = (f"--dependency={dependency}",) if dependency is not None else ()
    done = run_program(
        "sbatch", "--parsable", *options, f"--chdir={directory.path}", str(directory.script), seconds=_SECONDS
    )
    # The cluster's name may follow the number.
    number = done.stdout.strip().partition(";")[0]
    if done.returncode != 0 or not number.isdigit():
        raise _refusal(done.stderr or done.stdout)
    return number


def _refusal(message: str) -> HpctrainError:
    words = "\n  ".join(line.removeprefix("sbatch: ") for line in message.strip().splitlines())
    return HpctrainError(
        "HT-job-refused",
        "sbatch refuses the job: {reason}",
        "hpctrain submit … --dry-run shows its script; sinfo, what there is",
        reason=words,
    )


def job_script(
    request: JobRequest,
    profile: ClusterProfile,
    *,
    run_directory: Path,
    folder: Path,
    virtual_environment: Path | None = None,
    no_kill: bool = False,
) -> str:
    """The text of the job script.

    Args:
        profile: gives modules, setup lines and variables.
        run_directory, folder: absolute; where the run's files are, and where the job is submitted from.
        virtual_environment: that the script activates.
        no_kill: the run goes on without a node that fails.
    """
    return render(
        "job.sh.j2",
        profile,
        directives=directives(request),
        run_dir=run_directory,
        folder=folder,
        virtual_environment=virtual_environment,
        no_kill=no_kill,
        requeue=request.requeue,
        signal_seconds=request.signal_seconds,
    )


def directive(option: str, value: str | int | None = None) -> str:
    """The line of one option.

    Within double quotes Slurm's parser (22.05) takes every character as it is, but for the backslash, which makes the
    next one plain. Outside of them a blank ends the value, even one after a backslash, and # begins a comment.

    Args:
        option: its long name, without the dashes.
        value: one line of text; None for an option without a value.
    """
    if value is None:
        return f"#SBATCH --{option}"
    text = str(value)
    if not _PLAIN.fullmatch(text):
        text = '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'
    return f"#SBATCH --{option}={text}"


def directives(request: JobRequest) -> tuple[str, ...]:
    """The options of the job, one per line, without those about the script itself (log, signal, requeue).

    ``--dependency`` is not among them: it is for the first job, and the script is also that of those which follow.
    """
    gpus = _gpus(request)
    requested: dict[str, str | int | None] = {
        "job-name": request.name,
        "partition": request.partition,
        "account": request.account,
        "qos": request.qos,
        "constraint": request.constraint,
        "nodes": request.nodes + request.spare,
        "ntasks-per-node": request.tasks_per_node,
        "cpus-per-task": request.cpus_per_task,
        request.gpu_option: gpus,
        "mem": request.memory,
        "time": request.time,
    }
    lines = [directive(option, value) for option, value in requested.items() if value is not None]
    if request.exclusive:
        lines.append(directive("exclusive"))
    further = {option: value for option, value in request.sbatch.items() if not (gpus and option == request.gpu_option)}
    return (*lines, *(directive(option, value) for option, value in further.items()))


def _gpus(request: JobRequest) -> str | None:
    if not request.gpus_per_node:
        return None
    number = f"{request.gpu_type}:{request.gpus_per_node}" if request.gpu_type else str(request.gpus_per_node)
    if request.gpu_option != "gres":
        return number
    # Slurm uses only the last --gres.
    others = request.sbatch.get("gres")
    return f"gpu:{number},{others}" if others else f"gpu:{number}"
