"""How a run ended, and how to go on with it."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

from pydantic import BaseModel

from hpctrain.run.directory import RunDirectory, read_model

_TASK = re.compile(r"task-(\d+)", re.ASCII)


class _Summary(BaseModel):
    status: str


def summary_status(directory: RunDirectory) -> str | None:
    """``done``, ``failed`` or ``resumable``, from ``summary.json``; None where there is none.

    Raises:
        HpctrainError: it is damaged.
    """
    return read_model(directory.summary, _Summary).status if directory.summary.exists() else None


def resume_command(directory: RunDirectory) -> str:
    """What a user types to go on with a run: one that was submitted goes on in a job again.

    Args:
        directory: of the run, of an array, or of one task of an array.
    """
    job, options = directory, list[str]()
    if (task := array_task(directory)) is not None:
        job, options = RunDirectory(directory.path.parent), [f"--array={task}"]
    if not job.submission.exists():
        # It knows events, which take longer to import than a dry run of a job takes.
        from hpctrain.launch import attempts

        return attempts.resume_command(directory)
    return shlex.join(["sbatch", f"--chdir={job.path}", *options, str(job.script)])


def array_task(directory: RunDirectory) -> int | None:
    """The number of the task whose directory it is; None for any other."""
    return task_number(directory.path) if RunDirectory(directory.path.parent).submission.exists() else None


def task_number(path: Path) -> int | None:
    """The number in the name of a task's directory; None for any other name."""
    name = _TASK.fullmatch(path.name)
    return int(name[1]) if name else None
