"""Jobs as a scheduler knows them, and durations as Slurm writes and reads them."""

from __future__ import annotations

import re
from pathlib import Path

from pydantic import BaseModel, ConfigDict

_ID = re.compile(r"[1-9]\d{0,19}(_\d{1,9})?", re.ASCII)
_TIME = re.compile(r"(?:(?P<days>\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", re.ASCII)
_ENDED = frozenset(
    (
        *("BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED"),
        *("NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED", "REVOKED", "TIMEOUT"),
    )
)


class JobState(BaseModel):
    """One job. One task of an array is a job too, and the waiting tasks of an array are one.

    Attributes:
        id: its number, ``%j`` in the names of logs; each task of an array has one of its own.
        state: Slurm's word, whatever the scheduler, such as ``PENDING``, ``RUNNING``, ``COMPLETED``, ``TIMEOUT``.
        reason: Slurm's word for why it waits, or how it ended; empty where there is none.
        start: when it began, or is expected to, in seconds since the epoch; None where Slurm does not know.
        seconds: that it has run, since its last start.
        limit_seconds: the job's time limit; None for no limit.
        nodes: in bracket form, empty before it has any.
        exit_code, signal: of the batch script; 0 while it runs.
        command: the job script's path, its arguments after it; empty where there is none, or only the accounting
            remembers the job.
        directory: that of the run, from which the job was submitted.
    """

    model_config = ConfigDict(frozen=True, defer_build=True)

    id: str
    state: str
    reason: str = ""
    start: float | None = None
    seconds: int = 0
    limit_seconds: int | None = None
    nodes: str = ""
    exit_code: int = 0
    signal: int = 0
    command: str = ""
    directory: Path

    @property
    def live(self) -> bool:
        """Whether it runs or may still run."""
        return self.state not in _ENDED

    @property
    def waits(self) -> bool:
        """Whether it has no nodes yet, or lost them."""
        return self.live and not self.nodes


def is_job_id(text: str) -> bool:
    """Whether a text is a job number, with or without the number of an array task (``12``, ``12_3``)."""
    return _ID.fullmatch(text) is not None


def slurm_seconds(text: str) -> int | None:
    """The seconds of a duration, or None for any other text, such as ``UNLIMITED``.

    Slurm's forms are minutes, minutes:seconds, hours:minutes:seconds, days-hours, days-hours:minutes and
    days-hours:minutes:seconds (``man sbatch``, ``--time``). ``squeue`` and ``sacct`` print some of them.
    """
    match = _TIME.fullmatch(text)
    if match is None:
        return None
    days, *numbers = (None if part is None else int(part) for part in match.groups())
    given = [number for number in numbers if number is not None]
    if days is not None:
        hours, minutes, seconds = (*given, 0, 0)[:3]
    elif len(given) == 3:
        hours, minutes, seconds = given
    else:
        hours, minutes, seconds = 0, *(*given, 0)[:2]
    return (((days or 0) * 24 + hours) * 60 + minutes) * 60 + seconds
