"""``#SBATCH`` lines. Slurm parses them by rules of its own, without a shell."""

from __future__ import annotations

import re

from hpctrain.control.schedulers.request import JobRequest

_PLAIN = re.compile(r"[\w@%+=:,./\[\]*|&()!~^-]+", re.ASCII)


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
    asked: dict[str, str | int | None] = {
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
    lines = [directive(option, value) for option, value in asked.items() if value is not None]
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
    # Slurm takes the last --gres alone.
    others = request.sbatch.get("gres")
    return f"gpu:{number},{others}" if others else f"gpu:{number}"
