"""The status of a run, from its events, its records and its jobs; and the runs in a folder, newest first."""

from __future__ import annotations

import os
import shlex
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from hpctrain.common.errors import HpctrainError
from hpctrain.common.files.printable import shell_word, shortened
from hpctrain.common.recipes.difference import settings
from hpctrain.common.recipes.mesh_traffic import aligned
from hpctrain.common.run.directory import RunDirectory, read_model, resume_command
from hpctrain.common.run.events import Event
from hpctrain.common.run.events.kinds import DamagedEvent, ExcludedEvent, StartEvent
from hpctrain.common.run.plan import Plan
from hpctrain.common.run.records import read_records, works_in
from hpctrain.control.schedulers.cancel import launcher_process
from hpctrain.control.schedulers.jobs import JobState
from hpctrain.control.schedulers.run_jobs import LastWords, jobs_of, last_words, may_go_on, own_jobs, summary_status
from hpctrain.control.schedulers.scheduler import Scheduler
from hpctrain.control.schedulers.submission import scheduler_of, submitted_jobs
from hpctrain.report.output import duration
from hpctrain.report.record import Record, StepTotals, event_line, of_kind

# The status appears without the scheduler's answer if that takes longer.
_ANSWER_SECONDS = 10.0
# A run counts as silent when it has recorded nothing for longer than both of these.
_SILENT_SECONDS = 60.0
_SILENT_STEPS = 10
# Of the newest metric, in the list.
_LONGEST_NAME = 24

Jobs = Callable[[Scheduler], tuple[Sequence[JobState], str | None]]


class RunStatus(BaseModel):
    """One run; None where it is not known.

    Attributes:
        state: ``not started``, ``waiting`` (for its job to start), ``running``, ``done``, ``failed``, ``resumable``, or
            ``stopped`` for a run that ended without recording why.
        resume: the command that resumes it, where nothing else will.
        job_ids: the jobs of all attempts, and those that wait.
        train_loss, test_accuracy: the figures of the last epoch, as in ``summary.json``.
        samples_per_s, step_seconds: means over the last steps; the second includes the time between steps.
        remaining_s: the seconds until the training is done, at ``step_seconds`` a step.
        updated: the time of the last event, in seconds since the epoch; before the first 0, and in a list that of the
            plan.
        survived: the faults that it recovered from and the damaged checkpoints that it skipped, a line each.
        stalls: ranks that others had to wait for in this attempt, a line each.
        excluded: nodes that jobs of the run leave out, and why, a line each.
        silent: whether it runs, but has recorded nothing for longer than its steps explain.
        differs: in a list of runs, the settings in which those of this title differ, by dotted key.
    """

    model_config = ConfigDict(frozen=True, defer_build=True)

    run_dir: str
    title: str
    state: str
    message: str = ""
    resume: str | None = None
    attempt: int | None = None
    job_ids: tuple[str, ...] = ()
    jobs: tuple[JobState, ...] = ()
    ranks: int | None = None
    hosts: tuple[str, ...] = ()
    step: int | None = None
    steps: int | None = None
    epoch: int | None = None
    epochs: int | None = None
    step_loss: float | None = None
    train_loss: float | None = None
    test_accuracy: float | None = None
    logged: dict[str, float | None] = {}
    samples_per_s: float | None = None
    step_seconds: float | None = None
    elapsed_s: float | None = None
    remaining_s: float | None = None
    job_remaining_s: float | None = None
    updated: float
    last_event_s: float | None = None
    survived: tuple[str, ...] = ()
    stalls: tuple[str, ...] = ()
    excluded: tuple[str, ...] = ()
    silent: bool = False
    differs: dict[str, Any] = {}


def read_status(directory: RunDirectory) -> tuple[RunStatus, str | None]:
    """The current status of a run; and the scheduler's error if it does not answer."""
    record = Record(directory)
    try:
        jobs = jobs_of(directory, record.jobs, seconds=_ANSWER_SECONDS)
    except HpctrainError as error:
        return run_status(directory, record, [], answered=False), error.message
    return run_status(directory, record, jobs, answered=True), None


def run_status(directory: RunDirectory, record: Record, jobs: Sequence[JobState], *, answered: bool) -> RunStatus:
    """Read the rest of a run: its plan, its summary and its processes."""
    job_ids = tuple(dict.fromkeys([*record.jobs, *submitted_jobs(directory), *(job.id for job in jobs)]))
    in_a_job = bool(record.start.job if record.start else job_ids)
    known = KnownRun(
        directory=directory,
        plan=read_model(directory.plan, Plan),
        record=record,
        jobs=jobs,
        job_ids=job_ids,
        summary=summary_status(directory),
        alive=False if in_a_job and answered else _alive(directory, record.start),
    )
    return known.status(time.time())


def _alive(directory: RunDirectory, start: StartEvent | None) -> bool | None:
    """Whether the run's launcher or a rank is alive; None if they are on another host, or another user's."""
    records = read_records(directory).values()
    named = (start and launcher_process(start), *(record.process() for record in records))
    living = [process for process in named if process]
    if any(works_in(process, directory.path) for process in living):
        return True
    if living and directory.path.stat().st_uid != os.getuid():
        return None
    if start and start.host == socket.gethostname():
        return False
    elsewhere = (start and start.host) or any(record.host != socket.gethostname() for record in records)
    return None if elsewhere else False


@dataclass(frozen=True, kw_only=True)
class KnownRun:
    """Everything that is known about a run.

    Attributes:
        alive: whether its processes are alive; None where that cannot be seen from here.
    """

    directory: RunDirectory
    plan: Plan
    record: Record
    jobs: Sequence[JobState]
    job_ids: tuple[str, ...]
    summary: str | None
    alive: bool | None

    def status(self, now: float) -> RunStatus:
        """The status at a time, in seconds since the epoch."""
        state, record = self._state(), self.record
        start, run, attempt = record.start, record.run, record.last_attempt
        epoch = record.epochs[-1] if record.epochs else None
        survived: list[Event] = [fault for _, fault in record.survived]
        survived += of_kind(record.events, DamagedEvent)
        return RunStatus(
            run_dir=str(self.directory.path),
            title=self.plan.title,
            state=state,
            message=self._message(state),
            resume=resume_command(self.directory)
            if state in ("resumable", "stopped") and may_go_on(self.summary, self._words)
            else None,
            attempt=start.attempt if start else None,
            job_ids=self.job_ids,
            jobs=tuple(self.jobs),
            ranks=run.ranks if run else self.plan.ranks,
            hosts=(start and start.hosts) or tuple(host.host for host in self.plan.hosts),
            step=record.iteration,
            steps=record.iterations,
            epoch=record.newest_steps[-1].epoch if record.newest_steps else epoch.epoch if epoch else None,
            epochs=run.epochs if run else None,
            step_loss=record.newest_steps[-1].loss if record.newest_steps else None,
            train_loss=epoch.train_loss if epoch else None,
            test_accuracy=epoch.test_accuracy if epoch else None,
            logged={name: value for event in record.newest_logs for name, value in event.values.items()},
            samples_per_s=StepTotals(record.newest_timed).samples_per_s,
            step_seconds=record.step_seconds,
            survived=tuple(filter(None, map(event_line, survived))),
            stalls=tuple(filter(None, map(event_line, attempt.stalls if attempt else ()))),
            excluded=tuple(filter(None, map(event_line, of_kind(record.events, ExcludedEvent)))),
            updated=record.last_time or 0.0,
            **self._times(state, now),
        )

    @property
    def _running(self) -> JobState | None:
        return next((job for job in self.jobs if job.live and not job.waits), None)

    def _state(self) -> str:
        if self.summary == "done":
            return "done"
        if self._running and self.summary != "failed":
            return "running"
        if any(job.waits for job in self.jobs):
            return "waiting"
        if self.summary:
            return self.summary
        if self.alive:
            return "running"
        if self.record.end:
            # The launcher could not write the summary, for which a full disk had no room.
            return self.record.end.status
        if self.alive is None and self.record.last_time:
            return "running"
        return "stopped" if self.record.last_time or self.job_ids else "not started"

    def _message(self, state: str) -> str:
        last = self.jobs[-1] if self.jobs else None
        match state:
            case "waiting":
                return "; ".join(_waits_for(job) for job in self.jobs if job.waits)
            case "running" if self.alive is None and not last:
                host = (self.record.start and self.record.start.host) or "another host"
                return f"its launcher is on {host}; whether it is alive cannot be seen from here"
            case "stopped" if last:
                why = f" ({last.reason})" if last.reason else ""
                return f"job {last.id} ended as {last.state}{why}, exit code {last.exit_code}{self._last_words}"
            case "stopped":
                return f"its processes are gone{self._last_words}"
            case "resumable" if (attempt := self.record.last_attempt) and attempt.stopped:
                return attempt.stopped.text
            case "failed" | "resumable":
                return self.record.faults[-1].message if self.record.faults else ""
        return ""

    @property
    def _last_words(self) -> str:
        """What the job's log says last, where the run itself recorded nothing."""
        return f": {self._words}" if self._words else ", and nothing that they wrote says why"

    @cached_property
    def _words(self) -> LastWords | None:
        return last_words(self.directory, self.job_ids)

    def _times(self, state: str, now: float) -> dict[str, Any]:
        record, job = self.record, self._running
        step_seconds, last_time = record.step_seconds, record.last_time
        first = record.start or record.run
        begin = first.time if first else None
        end = now if state == "running" else last_time
        since = None if last_time is None else max(0.0, now - last_time)
        remaining = None
        if state not in ("done", "failed") and step_seconds is not None and record.iterations is not None:
            remaining = (record.iterations - (record.iteration or 0)) * step_seconds
        left = job.limit_seconds - job.seconds if job and job.limit_seconds else None
        explained = max(_SILENT_SECONDS, _SILENT_STEPS * (step_seconds or 0.0))
        return {
            "elapsed_s": None if begin is None or end is None else max(0.0, end - begin),
            "remaining_s": remaining,
            "job_remaining_s": left,
            "last_event_s": since,
            "silent": state == "running" and since is not None and since > explained,
        }


def _waits_for(job: JobState) -> str:
    """The reason that Slurm gives for a job's waiting, and the expected start."""
    until = time.strftime("; expected to start at %Y-%m-%d %H:%M", time.localtime(job.start)) if job.start else ""
    return f"job {job.id} waits: {job.reason or 'no reason given'}{until}"


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
    runs = sorted(_with_differences(runs), key=lambda run: run.updated, reverse=True)
    return runs, next((problem for _, problem in asked.values() if problem), None)


def _jobs(scheduler: Scheduler, folder: Path) -> tuple[Sequence[JobState], str | None]:
    try:
        return scheduler.list(None, user=folder.stat().st_uid, seconds=_ANSWER_SECONDS), None
    except HpctrainError as error:
        return [], error.message


def _read(directory: RunDirectory, jobs: Jobs) -> RunStatus:
    """One of several runs, with all of its settings."""
    made = 0.0
    try:
        made = directory.plan.stat().st_mtime
        record = Record(directory)
        numbers = {*submitted_jobs(directory), *record.jobs}
        known, problem = jobs(scheduler_of(directory)) if numbers else ([], None)
        run = run_status(directory, record, own_jobs(directory, numbers, known), answered=problem is None)
        plan = read_model(directory.plan, Plan)
        values = {
            **settings(plan.work),
            **{key: getattr(plan, key) for key in ("ranks", "framework", "backend")},
            **{f"versions.{name}": version for name, version in plan.versions.items()},
        }
        return run.model_copy(update={"updated": run.updated or made, "differs": values})
    except (HpctrainError, OSError) as error:
        # Another user's run, or one that is being removed, does not keep the others from being listed.
        message = error.message if isinstance(error, HpctrainError) else str(error)
        return RunStatus(run_dir=str(directory.path), title="", state="damaged", message=message, updated=made)


def _with_differences(runs: Sequence[RunStatus]) -> list[RunStatus]:
    """Runs with those of their settings in which the runs of one title differ."""
    described = []
    for title in {run.title for run in runs}:
        alike = [run for run in runs if run.title == title]
        first = alike[0].differs
        keys = dict.fromkeys(key for run in alike for key in run.differs)
        differing = [key for key in keys if any(run.differs.get(key) != first.get(key) for run in alike)]
        for run in alike:
            described.append(run.model_copy(update={"differs": {key: run.differs.get(key) for key in differing}}))
    return described


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
            run.message.partition("\n")[0]
            or ", ".join(f"{key}={_value_text(value)}" for key, value in run.differs.items()),
        )
        for run in reversed(runs)
    ]
    return "\n".join(_cut(line, width, len(row[0])) for row, line in zip(table, aligned(table), strict=True))


def _metric(run: RunStatus) -> str:
    """The newest of what a run measures: the test accuracy, or the loss, or what a script logs last."""
    measured = run.logged or {"accuracy": run.test_accuracy, "loss": run.train_loss, "step loss": run.step_loss}
    known = ((name, value) for name, value in measured.items() if value is not None)
    return next((f"{shortened(_value_text(name), _LONGEST_NAME)} {value:.4g}" for name, value in known), "")


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
