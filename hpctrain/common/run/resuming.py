"""The command that resumes a run."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

from hpctrain.common.files.printable import shell_word
from hpctrain.common.run.directory import RunDirectory

_TASK = re.compile(r"task-(\d+)", re.ASCII)


def resume_command(directory: RunDirectory, *options: str) -> str:
    """The command that resumes a run: for one that was submitted, the command that submits it again.

    Args:
        directory: a run's, an array's, or that of one task of an array.
        options: for ``hpctrain run``; with any, the run goes on where the command is typed.
    """
    job, task = directory, array_task(directory)
    if task is not None:
        job = RunDirectory(directory.path.parent)
    if options or not job.submission.exists():
        return " ".join([f"hpctrain run --resume --run-dir {shell_word(directory.path)}", *map(shlex.quote, options)])
    array = "" if task is None else f"--array={task} "
    return f"sbatch --chdir={shell_word(job.path)} {array}{shell_word(job.script)}"


def array_task(directory: RunDirectory) -> int | None:
    """The number of the task whose directory it is; None for any other."""
    return task_number(directory.path) if RunDirectory(directory.path.parent).submission.exists() else None


def task_number(path: Path) -> int | None:
    """The number in the name of a task's directory; None for any other name."""
    name = _TASK.fullmatch(path.name)
    return int(name[1]) if name else None
