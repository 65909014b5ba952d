"""The outcome of a run, and the wait for it."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from pydantic import BaseModel

from hpctrain.common.errors import HpctrainError
from hpctrain.common.files.printable import printable
from hpctrain.common.files.regular import last_lines
from hpctrain.common.run.directory import RunDirectory, read_model
from hpctrain.common.run.value_types import Outcome
from hpctrain.control.schedulers.find_run import jobs_of
from hpctrain.control.schedulers.jobs import JobState
from hpctrain.control.schedulers.submission import scheduler_of

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
