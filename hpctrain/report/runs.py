"""The runs in a folder, newest first."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from hpctrain.common.errors import HpctrainError
from hpctrain.common.files.printable import shell_word
from hpctrain.common.run.directory import RunDirectory
from hpctrain.common.run.resuming import array_task
from hpctrain.control.schedulers.find_run import FoundRun, own_jobs
from hpctrain.control.schedulers.slurm.queue import JobState, jobs_of_user
from hpctrain.report.record import Progress
from hpctrain.report.status import run_status

# The list appears without Slurm's answer if that takes longer.
_SLURM_SECONDS = 10.0

Jobs = Callable[[], tuple[Sequence[JobState], str | None]]


class RunRow(BaseModel):
    """One run; None where it is not known.

    Attributes:
        name: the path of its directory within the folder.
        title: the name of the recipe or script.
        state: see :class:`hpctrain.report.status.RunStatus`; or ``damaged``.
        message: why it is in that state; empty where there is nothing to say.
        time: the time of the last event, in seconds since the epoch.
    """

    model_config = ConfigDict(frozen=True, defer_build=True)

    name: str
    run_dir: str
    title: str | None = None
    state: str
    message: str = ""
    step: int | None = None
    steps: int | None = None
    time: float


def list_runs(folder: Path) -> tuple[list[RunRow], str | None]:
    """Every run in the folder, including arrays and series; and Slurm's error if it does not answer.

    Slurm is asked at most once, for the jobs that live.
    """
    plans = [plan for pattern in ("*/plan.json", "*/*/plan.json") for plan in folder.glob(pattern)]
    asked: list[tuple[Sequence[JobState], str | None]] = []

    def jobs() -> tuple[Sequence[JobState], str | None]:
        if not asked:
            asked.append(_jobs(folder))
        return asked[0]

    rows = [_row(RunDirectory(plan.parent.resolve()), str(plan.parent.relative_to(folder)), jobs) for plan in plans]
    return sorted(rows, key=lambda row: row.time, reverse=True), asked[0][1] if asked else None


def _jobs(folder: Path) -> tuple[Sequence[JobState], str | None]:
    try:
        return jobs_of_user(folder.stat().st_uid, seconds=_SLURM_SECONDS), None
    except HpctrainError as error:
        return [], error.message


def _row(directory: RunDirectory, name: str, jobs: Jobs) -> RunRow:
    made = 0.0
    try:
        made = directory.plan.stat().st_mtime
        progress = Progress.read(directory)
        task = array_task(directory)
        found = FoundRun(directory=directory, task=task, tasks={})
        numbers = {*found.submitted_jobs(), *progress.jobs}
        known, problem = jobs() if numbers else ([], None)
        own = [job for job in own_jobs(found, numbers, known) if task is None or job.has_task(task)]
        status = run_status(directory, found, progress, own, task, problem is None)
    except (HpctrainError, OSError) as error:
        # Another user's run, or one that is being removed, does not keep the others from being listed.
        message = error.message if isinstance(error, HpctrainError) else str(error)
        return RunRow(name=name, run_dir=str(directory.path), state="damaged", message=message, time=made)
    return RunRow(
        name=name,
        run_dir=status.run_dir,
        title=status.title,
        state=status.state,
        message=status.message,
        step=status.step,
        steps=status.steps,
        time=progress.last_time or made,
    )


def runs_text(rows: Sequence[RunRow], folder: Path, width: int | None) -> str:
    """One line for each run, newest last, with a path that other commands take.

    Args:
        folder: that of the runs.
        width: columns; why a run is in its state is cut to them, and its path never is.
    """
    table = [
        (
            shell_word(folder / row.name),
            row.state,
            "" if row.step is None else f"{row.step:,}" if row.steps is None else f"{row.step:,} of {row.steps:,}",
            _when(row.time),
            row.message.partition("\n")[0],
        )
        for row in reversed(rows)
    ]
    widths = [max(map(len, column)) for column in list(zip(*table, strict=True))[:-1]]
    return "\n".join(_cut("  ".join(map(str.ljust, row, [*widths, 0])).rstrip(), width, len(row[0])) for row in table)


def _when(moment: float) -> str:
    """The time of a moment of today, and the date of one before."""
    date, clock = time.strftime("%Y-%m-%d %H:%M", time.localtime(moment)).split()
    return clock if date == time.strftime("%Y-%m-%d") else date


def _cut(line: str, width: int | None, least: int) -> str:
    if width is None or len(line) <= width:
        return line
    return f"{line[: max(width - 1, least)].rstrip()}…"
