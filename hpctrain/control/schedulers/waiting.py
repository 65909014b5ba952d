"""Waits for a submitted run until none of its jobs can continue it."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable

from hpctrain.common.errors import HpctrainError
from hpctrain.common.run.directory import RunDirectory
from hpctrain.control.schedulers.find_run import find_run, jobs_of
from hpctrain.control.schedulers.jobs import JobState
from hpctrain.control.schedulers.outcome import summary_status
from hpctrain.control.supervision.follow import Follower

_ANSWER_SECONDS = 30.0
# A restarting controller does not answer for some minutes; a longer absence needs an administrator.
_AWAY_SECONDS = 600.0
_ASK_SECONDS = 2.0
_LOOK_SECONDS = 0.2
# Exit codes by status; any other status gives 1.
_CODES = {"done": 0, "resumable": 4}


def wait(directory: RunDirectory, follower: Follower | None, notice: Callable[[str], None]) -> None:
    """Return when no job of the run is left, including requeued jobs and follow-ups.

    Args:
        follower: passes on what the run writes; None for an array, because its tasks' output would be mixed.
        notice: gets each change of a job's state.

    Raises:
        HpctrainError: the scheduler does not answer for ten minutes.
    """
    found = find_run(str(directory.path))
    reported: dict[str, str] = {}
    answered = time.monotonic()
    live = True
    while live:
        try:
            jobs = jobs_of(found, seconds=_ANSWER_SECONDS)
        except HpctrainError:
            if time.monotonic() - answered > _AWAY_SECONDS:
                raise
        else:
            answered = time.monotonic()
            live = any(job.live for job in jobs)
            _report_changes(jobs, reported, notice)
        deadline = time.monotonic() + (_ASK_SECONDS if live else 0)
        while time.monotonic() < deadline:
            if follower:
                follower.advance()
            time.sleep(_LOOK_SECONDS)
    if follower:
        follower.advance(last=True)


def exit_code(directories: Iterable[RunDirectory]) -> int:
    """0 if all runs are done, 4 if the others can be resumed, else 1."""
    codes = {_CODES.get(status_left(directory) or "", 1) for directory in directories}
    return next(code for code in (1, 4, 0) if code in codes)


def status_left(directory: RunDirectory) -> str | None:
    """How the run ended; None if its summary is damaged, which must not hide how the other runs ended."""
    with contextlib.suppress(HpctrainError):
        return summary_status(directory)
    return None


def _report_changes(jobs: Iterable[JobState], reported: dict[str, str], notice: Callable[[str], None]) -> None:
    for job in jobs:
        details = [job.nodes, job.reason if job.waits else ""]
        text = f"{job.state.lower()}{''.join(f', {detail}' for detail in details if detail)}"
        if reported.get(job.id) != text:
            reported[job.id] = text
            notice(f"job {job.id}: {text}")
