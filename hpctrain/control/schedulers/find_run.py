"""Finds a run and its jobs from a run directory or a job number."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection, Iterable
from pathlib import Path

from hpctrain.common.errors import HpctrainError
from hpctrain.common.files.disk import reading
from hpctrain.common.files.printable import shell_word
from hpctrain.common.run.directory import RUNS, RunDirectory
from hpctrain.control.schedulers.jobs import JobState, is_job_id
from hpctrain.control.schedulers.scheduler import schedulers
from hpctrain.control.schedulers.submission import scheduler_of, submitted_jobs

_RUNS_HINT = "`hpctrain status` lists the runs in hpctrain-runs/; `squeue --me` lists jobs"

_ANSWER_SECONDS = 30.0

NO_RUNS_HINT = "hpctrain run digits makes one; a run elsewhere is named by its path, such as ./NAME"

# Names the newest run.
LAST = "last"


def last_run() -> Path:
    """The directory of the run in ``hpctrain-runs/`` that began or recorded something last.

    Raises:
        HpctrainError: there is none.
    """
    newest: tuple[float, Path] | None = None
    for plan in RUNS.glob("*/plan.json"):
        directory = RunDirectory(plan.parent)
        # A run that is being removed is none.
        with contextlib.suppress(OSError):
            times = [path.stat().st_mtime for path in (plan, directory.events) if path.exists()]
            newest = max(newest or (0.0, plan.parent), (max(times), plan.parent))
    if newest is None:
        raise HpctrainError("HT-run-not-found", "there is no run in {path}", NO_RUNS_HINT, path=RUNS.absolute())
    return newest[1]


def find_run(target: str) -> RunDirectory:
    """The run of a directory, of a job (``12``, or ``12_3`` of an array), or the :func:`last_run` (``last``).

    A directory called like a job's number is ``./12``, one called last ``./last``.

    Raises:
        HpctrainError: there is no such directory or job, or no run of hpctrain in it.
    """
    if target == LAST:
        path = last_run().resolve()
    else:
        path = _job_directory(target) if is_job_id(target) else _directory(target)
    found = RunDirectory(path)
    with reading(path, "name a run directory that you may read"):
        there = found.plan.exists()
    if not there:
        hint = "name the directory that `hpctrain run` or `hpctrain submit` made; it has a plan.json"
        called = f"the directory of job {target}, {path}," if is_job_id(target) else str(path)
        raise HpctrainError("HT-run-not-found", "{place} holds no run", hint, place=called)
    return found


def jobs_of(directory: RunDirectory, also: Collection[str] = (), *, seconds: float) -> list[JobState]:
    """The jobs of a run that its scheduler knows: those submitted together, follow-ups of its jobs, and ``also``.

    A job is a run's if its script is the run's own; another that only works in the directory is not.

    Args:
        also: numbers of jobs in which the run was started otherwise.
        seconds: how long the scheduler may take to answer.

    Raises:
        HpctrainError: it does not answer, or is not on this host.
    """
    numbers = {*submitted_jobs(directory), *also}
    if not numbers:
        return []
    user, scheduler = directory.path.stat().st_uid, scheduler_of(directory)
    jobs = [*scheduler.list(None, user=user, seconds=seconds)]
    jobs += scheduler.list(numbers.difference(job.id for job in jobs), user=user, seconds=seconds)
    return own_jobs(directory, numbers, jobs)


def own_jobs(directory: RunDirectory, numbers: Collection[str], jobs: Iterable[JobState]) -> list[JobState]:
    """A user's jobs that have one of a run's numbers or its script.

    A copy of a run's directory tells of the jobs of the other, whose script lies there.
    """
    script, submitted = directory.script, {*submitted_jobs(directory)}

    def known(job: JobState) -> bool:
        # True or False, whatever the text is.
        copied = job.id in submitted and os.path.exists(job.command)  # noqa: PTH110
        return not copied and job.id in numbers

    return [job for job in jobs if _same_file(Path(job.command), script) or known(job)]


def _same_file(one: Path, other: Path) -> bool:
    """Whether two paths are one file; the disk is asked only if their last names are equal."""
    return one == other or (one.name == other.name and one.resolve() == other.resolve())


def _directory(target: str) -> Path:
    path = Path(target)
    try:
        if path.is_dir():
            return path.resolve()
        problem = "it is a file" if path.exists() else "there is none of that name"
    except OSError as error:
        problem = str(error.strerror)
    raise HpctrainError(
        "HT-run-not-found",
        "{target} is neither a run directory nor a job's number: {reason}",
        _hint(target),
        target=target,
        reason=problem,
    )


def _hint(target: str) -> str:
    path = RUNS / target
    try:
        is_run = path.is_dir()
    except OSError:
        is_run = False
    return f"did you mean {shell_word(path)}?" if is_run else _RUNS_HINT


def _job_directory(target: str) -> Path:
    silent: list[HpctrainError] = []
    for scheduler in schedulers():
        try:
            for state in scheduler.list([target], user=os.getuid(), seconds=_ANSWER_SECONDS):
                return state.directory
        except HpctrainError as error:
            # One whose programs are not here knows no job.
            if error.code != "HT-program-not-found":
                silent.append(error)
    if silent:
        raise silent[0]
    raise HpctrainError(
        "HT-run-not-found",
        "no scheduler knows the job {job}, or no longer does",
        "name its run directory, which remembers it",
        job=target,
    )
