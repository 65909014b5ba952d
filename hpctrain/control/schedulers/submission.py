"""Makes the directory of a run that is submitted; all of it, or nothing."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, Field

from hpctrain.common.errors import HpctrainError
from hpctrain.common.files.disk import disk_error
from hpctrain.common.files.regular import make_folder
from hpctrain.common.files.whole import write_whole
from hpctrain.common.run.directory import (
    RunDirectory,
    default_directory,
    new_directory,
    read_model,
    resume_command,
    write_json,
)
from hpctrain.common.run.plan import Plan
from hpctrain.control.schedulers.code_copy import Code, with_code, write_code
from hpctrain.control.schedulers.scheduler import DEFAULT, Order, Scheduler, scheduler


class Submission(BaseModel):
    """The content of ``RUN_DIR/submission.json``. Whatever version wrote it, its jobs are found."""

    cluster: str = Field(description="name of the profile")
    scheduler: str = DEFAULT
    jobs: tuple[Annotated[str, Field(pattern=r"^\d{1,20}$")], ...] = Field(
        description="numbers of the jobs that were submitted together, first to last"
    )
    resume: str | None = Field(None, description="the command that submits it again; None for Slurm's")


def submission_of(directory: RunDirectory) -> Submission | None:
    """How a run was submitted; None for a run that was not.

    Raises:
        HpctrainError: the file is damaged.
    """
    return read_model(directory.submission, Submission) if directory.submission.exists() else None


def submitted_jobs(directory: RunDirectory) -> tuple[str, ...]:
    """The numbers of the jobs that were submitted together; empty for a run that was not submitted."""
    submission = submission_of(directory)
    return submission.jobs if submission else ()


def scheduler_of(directory: RunDirectory) -> Scheduler:
    """The scheduler of a run's jobs."""
    submission = submission_of(directory)
    return scheduler(submission.scheduler if submission else DEFAULT)


def run_path(order: Order, plan: Plan) -> Path:
    """Where the run's directory goes, with a number after it if there is something and it was not named."""
    return (order.run_dir or default_directory(plan.title)).absolute()


@contextlib.contextmanager
def made_run(order: Order, plan: Plan, files: Mapping[str, str]) -> Iterator[RunDirectory]:
    """The directory of a new run with its plan and files, by name, which goes again if the block raises.

    Raises:
        HpctrainError: the directory holds a run, or cannot be written.
    """
    path, numbered = run_path(order, plan), order.run_dir is None
    script = plan.script and plan.script.path
    code = Code.of(script, copied=not order.no_copy) if script else None
    made = numbered or not path.exists()
    missing = [folder for folder in path.parents if not folder.exists()]
    directory = new_directory(path) if numbered else RunDirectory(path)
    before = set() if numbered else _prepare(directory)
    try:
        directory.create(with_code(plan, directory, code) if code else plan)
        if code and script:
            write_code(code, directory)
        _write(directory, files)
        yield directory
    except BaseException:
        _remove(directory.path, before, [directory.path, *missing] if made else [])
        raise


def record(directory: RunDirectory, order: Order, jobs: Sequence[str], resume: str | None = None) -> None:
    """Write down how a run was submitted, by which its jobs are found."""
    profile = order.cluster.profile
    submission = Submission(cluster=profile.name, scheduler=profile.scheduled_by, jobs=tuple(jobs), resume=resume)
    write_json(directory.submission, submission.model_dump(mode="json"))


def _write(directory: RunDirectory, files: Mapping[str, str]) -> None:
    try:
        make_folder(directory.logs)
        for name, text in files.items():
            write_whole(directory.path / name, text.encode(), private=True)
    except OSError as error:
        raise disk_error(error, directory.path) from error


def _prepare(directory: RunDirectory) -> set[Path]:
    """Make the directory, if need be; returns what was in it."""
    path = directory.path
    try:
        if not path.exists():
            # Fails if another submission made the folder first, so that its files are never removed as ours.
            make_folder(path, exist_ok=False)
            return set()
        before = set(path.iterdir())
    except OSError as error:
        raise disk_error(error, path) from error
    if before & {directory.plan, directory.submission, directory.events, directory.code, directory.code_diff}:
        raise HpctrainError(
            "HT-run-directory-taken",
            "{path} already holds a run, or what has the name of one's files",
            f"choose another place with --run-dir; to resume it: {resume_command(directory)}",
            path=path,
        )
    return before


def _remove(directory: Path, before: set[Path], missing: Sequence[Path]) -> None:
    """Remove what was made: all but ``before``, and the new folders unless others use them by now."""
    for made in set(directory.iterdir()) - before if directory.is_dir() else ():
        if made.is_dir():
            shutil.rmtree(made, ignore_errors=True)
        else:
            made.unlink(missing_ok=True)
    for folder in missing:
        with contextlib.suppress(OSError):
            folder.rmdir()
