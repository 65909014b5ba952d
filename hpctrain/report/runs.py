"""The runs in a folder, newest first."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

from hpctrain.common.errors import HpctrainError
from hpctrain.common.files.printable import shell_word, shortened
from hpctrain.common.recipes.mesh_traffic import aligned
from hpctrain.common.run.directory import RunDirectory
from hpctrain.control.schedulers.jobs import JobState
from hpctrain.control.schedulers.run_jobs import own_jobs
from hpctrain.control.schedulers.scheduler import Scheduler
from hpctrain.control.schedulers.submission import scheduler_of, submitted_jobs
from hpctrain.report.output import duration
from hpctrain.report.record import Record
from hpctrain.report.status import RunStatus, run_status

# The list appears without a scheduler's answer if that takes longer.
_ANSWER_SECONDS = 10.0
_LONGEST_NAME = 24

Jobs = Callable[[Scheduler], tuple[Sequence[JobState], str | None]]


def list_runs(folder: Path) -> tuple[list[RunStatus], str | None]:
    """Every run in the folder; and a scheduler's error if it does not answer.

    Each scheduler is asked at most once, for the jobs that live. A run that cannot be read is ``damaged``.
    """
    asked: dict[Scheduler, tuple[Sequence[JobState], str | None]] = {}

    def jobs(scheduler: Scheduler) -> tuple[Sequence[JobState], str | None]:
        if scheduler not in asked:
            asked[scheduler] = _jobs(scheduler, folder)
        return asked[scheduler]

    runs = [_read(RunDirectory(plan.parent.absolute()), jobs) for plan in folder.glob("*/plan.json")]
    runs.sort(key=lambda run: run.updated, reverse=True)
    return runs, next((problem for _, problem in asked.values() if problem), None)


def _jobs(scheduler: Scheduler, folder: Path) -> tuple[Sequence[JobState], str | None]:
    try:
        return scheduler.list(None, user=folder.stat().st_uid, seconds=_ANSWER_SECONDS), None
    except HpctrainError as error:
        return [], error.message


def _read(directory: RunDirectory, jobs: Jobs) -> RunStatus:
    made = 0.0
    try:
        made = directory.plan.stat().st_mtime
        record = Record(directory)
        numbers = {*submitted_jobs(directory), *record.jobs}
        known, problem = jobs(scheduler_of(directory)) if numbers else ([], None)
        run = run_status(directory, record, own_jobs(directory, numbers, known), answered=problem is None)
        return run.model_copy(update={"updated": run.updated or made})
    except (HpctrainError, OSError) as error:
        # Another user's run, or one that is being removed, does not keep the others from being listed.
        message = error.message if isinstance(error, HpctrainError) else str(error)
        return RunStatus(run_dir=str(directory.path), title="", state="damaged", message=message, updated=made)


def runs_text(runs: Sequence[RunStatus], folder: Path, width: int | None) -> str:
    """One line for each run, newest last, with a path that other commands take.

    Args:
        width: columns; why a run is in its state is cut to them, and its path never is.
    """
    table = [
        (
            shell_word(folder / Path(run.run_dir).name),
            run.state,
            "" if run.step is None else f"{run.step:,}" if run.steps is None else f"{run.step:,} of {run.steps:,}",
            _metric(run),
            _when(run.updated),
            duration(run.elapsed_s) or "",
            run.message.partition("\n")[0],
        )
        for run in reversed(runs)
    ]
    return "\n".join(_cut(line, width, len(row[0])) for row, line in zip(table, aligned(table), strict=True))


def _metric(run: RunStatus) -> str:
    """The newest of what a run measures: the test accuracy, or the loss, or what a script logs last."""
    measured = run.logged or {"accuracy": run.test_accuracy, "loss": run.train_loss, "step loss": run.step_loss}
    known = ((name, value) for name, value in measured.items() if value is not None)
    texts = (
        f"{shortened(name if name.isprintable() else repr(name), _LONGEST_NAME)} {value:.4g}" for name, value in known
    )
    return next(texts, "")


def _when(moment: float) -> str:
    """The time of a moment of today, and the date of one before."""
    date, clock = time.strftime("%Y-%m-%d %H:%M", time.localtime(moment)).split()
    return clock if date == time.strftime("%Y-%m-%d") else date


def _cut(line: str, width: int | None, least: int) -> str:
    if width is None or len(line) <= width:
        return line
    return f"{line[: max(width - 1, least)].rstrip()}…"
