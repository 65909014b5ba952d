"""A run and its jobs: they are found from a directory or a number, waited for, and asked how they ended."""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from pydantic import BaseModel

from hpctrain.common.errors import HpctrainError
from hpctrain.common.files.disk import reading
from hpctrain.common.files.printable import printable
from hpctrain.common.files.regular import last_lines
from hpctrain.common.run.directory import RUNS, RunDirectory, read_model
from hpctrain.common.run.value_types import Outcome
from hpctrain.control.schedulers.jobs import JobState, is_job_id
from hpctrain.control.schedulers.scheduler import schedulers
from hpctrain.control.schedulers.submission import scheduler_of, submitted_jobs

if TYPE_CHECKING:
    from hpctrain.control.supervision.follow import Follower

_ANSWER_SECONDS = 30.0
# A restarting controller does not answer for some minutes; a longer absence needs an administrator.
_AWAY_SECONDS = 600.0
_ASK_SECONDS = 2.0
_LOOK_SECONDS = 0.2
# Exit codes by status; any other status gives 1.
_CODES = {"done": 0, "resumable": 4}

# Of a longer line of a log the end is left out.
_LONGEST = 400
# How an error of hpctrain begins.
_ERROR = re.compile(r"(hpctrain: )?(error|stopped)\[HT-[a-z-]+\]: ")

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
    # Unlike pathlib's, this accepts any name.
    if not os.path.isdir(target):  # noqa: PTH112
        raise HpctrainError(
            "HT-run-not-found",
            "{target} is neither a run directory nor a job's number",
            "`hpctrain status` lists the runs in hpctrain-runs/",
            target=target,
        )
    return Path(target).resolve()


def _job_directory(target: str) -> Path:
    silent: list[HpctrainError] = []
    for scheduler in schedulers():
        try:
            for state in scheduler.list([target], user=os.getuid(), seconds=_ANSWER_SECONDS):
                # Of a job that has ended not every scheduler remembers the folder, which is not the one here.
                if state.directory.is_absolute():
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


class _Summary(BaseModel):
    status: Outcome


def summary_status(directory: RunDirectory) -> Outcome | None:
    """The status in ``summary.json``; None without that file.

    Raises:
        HpctrainError: it is damaged.
    """
    return read_model(directory.summary, _Summary).status if directory.summary.exists() else None


class LastWords(NamedTuple):
    """The end of a job's log: its last line, and the last error of hpctrain, if any."""

    log: Path
    line: str
    error: str | None

    @property
    def failed(self) -> bool:
        """Whether that error is one that resuming does not get past."""
        own = (self.error or "").removeprefix("hpctrain: ")
        # A job whose nodes could not be prepared may get others the next time.
        return own.startswith("error[") and not own.startswith("error[HT-job-")

    def __str__(self) -> str:
        return f"{self.error or self.line} ({self.log})"


def may_go_on(status: str | None, words: LastWords | None) -> bool:
    """Whether a run that is not done may get further when it is resumed: no error of its own ended it.

    Args:
        status: in its summary.
        words: the end of its job's log.
    """
    return status == "resumable" or (status is None and not (words and words.failed))


def last_words(directory: RunDirectory, jobs: Sequence[str] = ()) -> LastWords | None:
    """The end of the log of a run's last job; None without a log.

    Args:
        jobs: the numbers of the run's jobs, the last one last; the newest log counts where none of them has one.
    """
    logs = scheduler_of(directory).logs(directory, jobs)
    lines = [printable(line.strip())[:_LONGEST] for line in last_lines(logs[-1], 1000) if line.strip()] if logs else []
    if not lines:
        return None
    errors = [line for line in lines if _ERROR.match(line)]
    return LastWords(log=logs[-1], line=lines[-1], error=errors[-1] if errors else None)


def wait_for_end(directory: RunDirectory, follower: Follower, notice: Callable[[str], None]) -> None:
    """Return when no job of the run is left, including requeued jobs and follow-ups.

    Args:
        follower: passes on what the run writes.
        notice: gets each change of a job's state.

    Raises:
        HpctrainError: the scheduler does not answer for ten minutes.
    """
    reported: dict[str, str] = {}
    answered = time.monotonic()
    live = True
    while live:
        try:
            jobs = jobs_of(directory, seconds=_ANSWER_SECONDS)
        except HpctrainError:
            if time.monotonic() - answered > _AWAY_SECONDS:
                raise
        else:
            answered = time.monotonic()
            live = any(job.live for job in jobs)
            _report_changes(jobs, reported, notice)
        deadline = time.monotonic() + (_ASK_SECONDS if live else 0)
        while time.monotonic() < deadline:
            follower.advance()
            time.sleep(_LOOK_SECONDS)
    follower.advance(last=True)


def exit_code(status: Outcome | None) -> int:
    """The exit code for a run that ended so: 0 if it is done, 4 if it can be resumed, else 1."""
    return _CODES.get(status or "", 1)


def _report_changes(jobs: Iterable[JobState], reported: dict[str, str], notice: Callable[[str], None]) -> None:
    for job in jobs:
        details = [job.nodes, job.reason if job.waits else ""]
        text = f"{job.state.lower()}{''.join(f', {detail}' for detail in details if detail)}"
        if reported.get(job.id) != text:
            reported[job.id] = text
            notice(f"job {job.id}: {text}")
