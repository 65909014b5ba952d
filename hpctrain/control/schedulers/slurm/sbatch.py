"""The text of a job of Slurm: the script, and the directives in it."""

from __future__ import annotations

import re
from pathlib import Path

from hpctrain.common.errors import HpctrainError
from hpctrain.common.files.printable import encodable
from hpctrain.control.schedulers.job_request import JobRequest
from hpctrain.control.schedulers.job_script import render
from hpctrain.control.schedulers.profile import ClusterProfile

# What a directive needs no quotes for.
_PLAIN = re.compile(r"[\w@%+=:,./\[\]*|&()!~^-]+", re.ASCII)


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
        "gres": gpus,
        "mem": request.memory,
        "time": request.time,
    }
    lines = [directive(option, value) for option, value in requested.items() if value is not None]
    if request.exclusive:
        lines.append(directive("exclusive"))
    further = {option: value for option, value in request.sbatch.items() if not (gpus and option == "gres")}
    return (*lines, *(directive(option, value) for option, value in further.items()))


def _gpus(request: JobRequest) -> str | None:
    if not request.gpus_per_node:
        return None
    number = f"{request.gpu_type}:{request.gpus_per_node}" if request.gpu_type else str(request.gpus_per_node)
    # Slurm uses only the last --gres.
    others = request.sbatch.get("gres")
    return f"gpu:{number},{others}" if others else f"gpu:{number}"
