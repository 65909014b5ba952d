"""The outcome of a run."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from pydantic import BaseModel

from hpctrain.common.files.printable import printable
from hpctrain.common.files.regular import last_lines
from hpctrain.common.run.directory import RunDirectory, read_model
from hpctrain.common.run.value_types import Outcome
from hpctrain.control.schedulers.submission import scheduler_of

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
