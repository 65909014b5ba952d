"""Renders the job script from a request and a profile. Pure, except that it reads the template."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

from hpctrain.control.schedulers.job_request import JobRequest
from hpctrain.control.schedulers.profile import ClusterProfile
from hpctrain.control.schedulers.profiles import slurm_folder

_PLAIN = re.compile(r"[\w@%+=:,./\[\]*|&()!~^-]+", re.ASCII)


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
    # Imported here because only this needs it, and it takes long.
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(  # noqa: S701 - it is bash, which the filter quotes for
        loader=FileSystemLoader(slurm_folder()),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters["quote"] = lambda value: shlex.quote(str(value))
    return environment.get_template("job.sh.j2").render(
        directives=directives(request),
        run_dir=run_directory,
        folder=folder,
        virtual_environment=virtual_environment,
        no_kill=no_kill,
        array=request.array is not None,
        chain=request.chain,
        requeue=request.requeue,
        signal=request.signal,
        signal_seconds=request.signal_seconds,
        modules=profile.modules,
        setup=profile.setup,
        environment=profile.environment,
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
        "nodes": request.nodes,
        "ntasks-per-node": request.tasks_per_node,
        "cpus-per-task": request.cpus_per_task,
        request.gpu_option: gpus,
        "mem": request.memory,
        "time": request.time,
        "array": request.array,
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
