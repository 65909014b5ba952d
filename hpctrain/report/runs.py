"""The runs in a folder, newest first, and what differs between runs."""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from hpctrain.common.errors import HpctrainError
from hpctrain.common.files.printable import shell_word, shortened
from hpctrain.common.recipes.difference import settings
from hpctrain.common.run.directory import RunDirectory, read_model
from hpctrain.common.run.plan import Plan
from hpctrain.control.schedulers.find_run import own_jobs
from hpctrain.control.schedulers.jobs import JobState
from hpctrain.control.schedulers.scheduler import Scheduler
from hpctrain.control.schedulers.submission import scheduler_of, submitted_jobs
from hpctrain.report.output import duration
from hpctrain.report.record import Record
from hpctrain.report.status import RunStatus, run_status

# The list appears without a scheduler's answer if that takes longer.
_ANSWER_SECONDS = 10.0
_LONGEST_NAME = 24

Jobs = Callable[[Scheduler], tuple[Sequence[JobState], str | None]]


class RunRow(BaseModel):
    """One run; None where it is not known.

    Attributes:
        name: the path of its directory within the folder.
        title: the name of the recipe or script.
        state: see :class:`hpctrain.report.status.RunStatus`; or ``damaged``.
        message: why it is in that state; empty where there is nothing to say.
        metric: the newest of what it measures: the test accuracy, or the loss, or what a script logs last.
        seconds: from the beginning of the last attempt to its last event, or until now.
        differs: the settings in which the runs of this title differ, by dotted key.
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
    metric: tuple[str, float] | None = None
    seconds: float | None = None
    differs: dict[str, Any] = {}
    time: float
    plan: Plan | None = Field(None, exclude=True)


def list_runs(folder: Path, name: str = "*") -> tuple[list[RunRow], str | None]:
    """Every run in the folder; and a scheduler's error if it does not answer.

    Each scheduler is asked at most once, for the jobs that live.

    Args:
        name: a pattern of the names in the folder.
    """
    plans = folder.glob(f"{name}/plan.json")
    asked: dict[Scheduler, tuple[Sequence[JobState], str | None]] = {}

    def jobs(scheduler: Scheduler) -> tuple[Sequence[JobState], str | None]:
        if scheduler not in asked:
            asked[scheduler] = _jobs(scheduler, folder)
        return asked[scheduler]

    rows = [_row(RunDirectory(plan.parent.resolve()), str(plan.parent.relative_to(folder)), jobs) for plan in plans]
    rows = sorted(_with_differences(rows), key=lambda row: row.time, reverse=True)
    return rows, next((problem for _, problem in asked.values() if problem), None)


def _settings(plan: Plan) -> dict[str, Any]:
    """The settings of a run, by dotted key."""
    return {
        **settings(plan.work),
        **{key: getattr(plan, key) for key in ("ranks", "framework", "backend")},
        **{f"versions.{name}": version for name, version in plan.versions.items()},
    }


def _with_differences(rows: Sequence[RunRow]) -> list[RunRow]:
    described = [row for row in rows if row.plan is None]
    for title in {row.title for row in rows if row.plan}:
        alike = [(row, _settings(row.plan)) for row in rows if row.plan and row.title == title]
        keys = dict.fromkeys(key for _, values in alike for key in values)
        differing = [key for key in keys if any(values.get(key) != alike[0][1].get(key) for _, values in alike)]
        for row, values in alike:
            described.append(row.model_copy(update={"differs": {key: values.get(key) for key in differing}}))
    return described


def _jobs(scheduler: Scheduler, folder: Path) -> tuple[Sequence[JobState], str | None]:
    try:
        return scheduler.list(None, user=folder.stat().st_uid, seconds=_ANSWER_SECONDS), None
    except HpctrainError as error:
        return [], error.message


def _row(directory: RunDirectory, name: str, jobs: Jobs) -> RunRow:
    made = 0.0
    try:
        made = directory.plan.stat().st_mtime
        record = Record.read(directory)
        numbers = {*submitted_jobs(directory), *record.jobs}
        known, problem = jobs(scheduler_of(directory)) if numbers else ([], None)
        plan = read_model(directory.plan, Plan)
        status = run_status(directory, record, own_jobs(directory, numbers, known), answered=problem is None)
    except (HpctrainError, OSError) as error:
        # Another user's run, or one that is being removed, does not keep the others from being listed.
        message = error.message if isinstance(error, HpctrainError) else str(error)
        return RunRow(name=name, run_dir=str(directory.path), state="damaged", message=message, time=made)
    return RunRow(
        **status.model_dump(include={"run_dir", "title", "state", "message", "step", "steps"}),
        name=name,
        metric=_metric(status),
        seconds=status.elapsed_s,
        time=record.last_time or made,
        plan=plan,
    )


def _metric(run: RunStatus) -> tuple[str, float] | None:
    measured = run.logged or {"accuracy": run.test_accuracy, "loss": run.train_loss, "step loss": run.step_loss}
    return next(((name, value) for name, value in measured.items() if value is not None), None)


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
            "" if row.metric is None else f"{shortened(_value_text(row.metric[0]), _LONGEST_NAME)} {row.metric[1]:.4g}",
            _when(row.time),
            duration(row.seconds) or "",
            row.message.partition("\n")[0]
            or ", ".join(f"{key}={_value_text(value)}" for key, value in row.differs.items()),
        )
        for row in reversed(rows)
    ]
    widths = [max(map(len, column)) for column in list(zip(*table, strict=True))[:-1]]
    return "\n".join(_cut("  ".join(map(str.ljust, row, [*widths, 0])).rstrip(), width, len(row[0])) for row in table)


def _value_text(value: Any) -> str:
    """A value in one line: a list as words of a command line."""
    text = shlex.join(map(str, value)) if isinstance(value, list | tuple) else "—" if value is None else str(value)
    return text if text.isprintable() else repr(text)


def _when(moment: float) -> str:
    """The time of a moment of today, and the date of one before."""
    date, clock = time.strftime("%Y-%m-%d %H:%M", time.localtime(moment)).split()
    return clock if date == time.strftime("%Y-%m-%d") else date


def _cut(line: str, width: int | None, least: int) -> str:
    if width is None or len(line) <= width:
        return line
    return f"{line[: max(width - 1, least)].rstrip()}…"
