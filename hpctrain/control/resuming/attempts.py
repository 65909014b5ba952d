"""The attempts of one run: where the next one begins, and the lock that allows one at a time.

The hash of a script in the events, which tells whether it has changed, is of the file itself and of nothing it imports.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hpctrain.common.checkpoints.layout import damaged_checkpoints
from hpctrain.common.cluster.launcher import in_pod
from hpctrain.common.errors import HpctrainError
from hpctrain.common.files.disk import reading
from hpctrain.common.files.regular import private, sha256
from hpctrain.common.files.whole import lock
from hpctrain.common.run.directory import RunDirectory, resume_command
from hpctrain.common.run.events import Event, EventsFile, attempts
from hpctrain.common.run.events.kinds import (
    CheckpointEvent,
    EndEvent,
    FaultEvent,
    StallEvent,
    StartEvent,
    StoppedEvent,
)
from hpctrain.common.run.plan import Plan
from hpctrain.common.run.records import read_records
from hpctrain.common.run.stopping import RESUMABLE
from hpctrain.common.settings import JOB

# So often may a run be resumed in a row without progress, as by a job that goes back to the queue.
_RESUMES = 3
# The launcher of a job's earlier start may still be ending, and a file server releases the lock of a node that is gone
# when its lease ends: 90 s by NFS's default.
_LOCK_SECONDS = 180.0
# A script that worked this long is assumed to have made progress: a broken one fails within its first minutes.
_WORK_SECONDS = 600.0


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """One start of a run.

    Attributes:
        number: counts the run's attempts from 1.
        iteration: the iteration of the checkpoint from which it resumes, 0 for the beginning.
        damaged: the newer checkpoints, which are skipped, each with its fault.
        restart: its number among the launcher's own restarts without progress, 0 if it is not one of them.
    """

    number: int = 1
    iteration: int = 0
    damaged: tuple[tuple[Path, str], ...] = ()
    restart: int = 0

    def start(self, plan: Plan, launcher: str) -> StartEvent:
        """The event that begins the attempt."""
        return StartEvent(
            attempt=self.number,
            iteration=self.iteration,
            restart=self.restart,
            job=job_id(),
            launcher=launcher,
            hosts=tuple(host.host for host in plan.hosts),
            host=socket.gethostname(),
            pid=os.getpid(),
            script=script_sha256(plan),
        )


@contextlib.contextmanager
def hold_run(
    directory: RunDirectory,
    environment: Mapping[str, str] = os.environ,
    notice: Callable[[str], None] = lambda text: None,
) -> Iterator[None]:
    """Be the only launcher of a run, by a lock on ``RUN_DIR/lock`` where the file system has locks.

    Args:
        notice: is told of a wait for another launcher.

    Raises:
        HpctrainError: another launcher holds the lock.
    """
    path = directory.path / "lock"
    with reading(path, "is this a run directory?"):
        descriptor = private(str(path), os.O_RDWR | os.O_CREAT)
    try:
        _lock(descriptor, directory, environment, notice)
        yield
    finally:
        os.close(descriptor)


def _lock(
    descriptor: int, directory: RunDirectory, environment: Mapping[str, str], notice: Callable[[str], None]
) -> None:
    comes_back = bool(job_id(environment)) or in_pod(environment)
    path, elsewhere = directory.path / "lock", "choose another place with --run-dir"
    has_it = lock(descriptor, path, 0.0, elsewhere)
    if not has_it and comes_back:
        notice(f"{directory.path} is being run by {_holder(descriptor)}: waiting up to {_LOCK_SECONDS:g} s")
        has_it = lock(descriptor, path, _LOCK_SECONDS, elsewhere)
    if not has_it:
        raise HpctrainError(
            "HT-run-in-use",
            "{path} is being run by another hpctrain: {holder}",
            "wait until it ends, or stop it",
            # Kubernetes then starts another pod of this index, until the lock is free.
            exit_code=RESUMABLE if in_pod(environment) else 1 if comes_back else 2,
            path=directory.path,
            holder=_holder(descriptor),
        )
    # Names the lock's holder for the next launcher. A full disk is reported by the next write.
    with contextlib.suppress(OSError):
        os.truncate(descriptor, 0)
        os.pwrite(descriptor, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)


def _holder(descriptor: int) -> str:
    return os.pread(descriptor, 500, 0).decode(errors="replace").strip() or "unknown"


def job_id(environment: Mapping[str, str] = os.environ) -> str | None:
    """The number of this process's job, of which each task of a Slurm array has its own; None outside of jobs."""
    return environment.get("SLURM_JOB_ID") or JOB.read(environment)


def require_attempt_ended(directory: RunDirectory) -> None:
    """Refuse to start while ranks of the last attempt, as their records show, still run on this host."""
    records = read_records(directory).values()
    running = [record for record in records if record.status == "running" and record.own_process(directory)]
    if running:
        numbers = " ".join(str(record.pid) for record in running)
        saves = ", which makes them save their state and leave" if all(record.listens for record in running) else ""
        raise HpctrainError(
            "HT-run-still-alive",
            "{path}: ranks of the last attempt are still running on this host, though their launcher is "
            "gone: process {pids}",
            f"wait until they end, or end them: kill {numbers}{saves}",
            exit_code=1 if job_id() else 2,
            path=directory.path,
            pids=numbers,
        )


def next_attempt(
    directory: RunDirectory, events: Sequence[Event], restarts: int | None, *, script: bool = False
) -> Attempt | None:
    """The next attempt of a run that is resumed; None if it is done.

    Args:
        events: from :func:`run_events`; empty for a run that was only submitted.
        restarts: how many the run may have without progress, where that was said; it may be resumed as often, and at
            least three times.
        script: whether the run is a script's, whose checkpoints hpctrain does not know.

    Raises:
        HpctrainError: no checkpoint is left, or the run makes no progress.
    """
    further = attempt_from_here(directory, events)
    if further is None or not events:
        return further
    newest_first = reversed(attempts(events))
    idle = list(itertools.takewhile(lambda past: not made_progress(past, further, script=script), newest_first))
    # A launcher's own restarts have a separate limit.
    resumed = [attempt for attempt in idle if not _start(attempt).restart]
    if len(resumed) > max(restarts or 0, _RESUMES):
        raise _no_progress(directory, idle, None if script else further.iteration, len(resumed))
    return further


def attempt_from_here(directory: RunDirectory, events: Sequence[Event]) -> Attempt | None:
    """The next attempt: from the beginning, or from the newest intact checkpoint; None if the run is done.

    Raises:
        HpctrainError: none of the checkpoints that were written is left.
    """
    if is_done(events):
        return None
    from hpctrain.common.checkpoints.find import newest_whole

    newest = newest_whole(directory.checkpoints)
    if not newest.iteration:
        _require_none_written(directory, events, newest.damaged)
    return Attempt(number=len(attempts(events)) + 1, iteration=newest.iteration, damaged=newest.damaged)


def _require_none_written(
    directory: RunDirectory, events: Sequence[Event], damaged: Sequence[tuple[Path, str]]
) -> None:
    """Refuse to begin again if checkpoints are lost. A crash may have left damaged ones without an event."""
    written = [f"step {event.iteration}" for event in events if isinstance(event, CheckpointEvent)]
    faults = [fault for _, fault in damaged] + [
        f"{path} was found damaged" for path in damaged_checkpoints(directory.checkpoints)
    ]
    if written or faults:
        raise HpctrainError(
            "HT-run-checkpoints-lost",
            "{path}: a checkpoint was written{at}, but none can be read: {reasons}",
            "restore that folder, or start a new run with another --run-dir",
            exit_code=1,
            path=directory.path,
            at=f" at {written[-1]}" if written else "",
            reasons="; ".join(faults) or f"{directory.checkpoints} is empty",
        )


def is_done(events: Sequence[Event]) -> bool:
    """Whether the run is done; ``events`` are those of :func:`run_events`."""
    return bool(events) and isinstance(last := events[-1], EndEvent) and last.status == "done"


def made_progress(
    attempt: Sequence[Event],
    further: Attempt,
    *,
    script: bool,
    until: float | None = None,
) -> bool:
    """Whether a past attempt counts as progress: it wrote a checkpoint, or stopped in good order or worked for long if
    it was of a script, whose steps are not known.

    Args:
        attempt: its events of :func:`run_events`.
        further: the attempt that is to follow.
        until: when it ended, if that is not recorded; by default at its last event.
    """
    if not script:
        return further.iteration > _start(attempt).iteration
    last, kinds = attempt[-1], {type(event) for event in attempt}
    resumable = isinstance(last, EndEvent) and last.status == "resumable"
    if (resumable or StoppedEvent in kinds) and FaultEvent not in kinds:
        return True
    # Time spent hanging does not count as progress.
    stalls = [event.time - event.seconds for event in attempt if isinstance(event, StallEvent)]
    worked_until = (stalls or [until or last.time])[-1]
    return worked_until - attempt[0].time > _WORK_SECONDS


def _no_progress(
    directory: RunDirectory, idle: Sequence[Sequence[Event]], iteration: int | None, allow: int
) -> HpctrainError:
    """The error for a run that makes no progress; ``idle`` has the newest attempt first."""
    faults = [event.message for attempt in idle for event in reversed(attempt) if isinstance(event, FaultEvent)]
    return HpctrainError(
        "HT-run-no-progress",
        "{path}: its last {attempts} attempts ended without a clean stop{cause}"
        if iteration is None
        else "{path}: the last {attempts} attempts started at step {iteration} and got no further{cause}",
        f"fix the cause, then: {resume_command(directory, '--restarts', str(allow))}",
        exit_code=1,
        path=directory.path,
        attempts=len(idle),
        iteration=iteration,
        cause="".join(f"; what went wrong: {fault}" for fault in faults[:1]),
    )


def run_events(directory: RunDirectory) -> list[Event]:
    """The events about the run as a whole, from its first start; empty if only submitted.

    Raises:
        HpctrainError: the file is damaged; names the line.
    """
    kinds = (StartEvent, CheckpointEvent, StallEvent, FaultEvent, StoppedEvent, EndEvent)
    events = EventsFile(directory.events).of_kinds(*kinds)
    return list(itertools.dropwhile(lambda event: not isinstance(event, StartEvent), events))


def _start(attempt: Sequence[Event]) -> StartEvent:
    """The start event, which every attempt in :func:`run_events` has."""
    start = attempt[0]
    assert isinstance(start, StartEvent)
    return start


def script_sha256(plan: Plan) -> str | None:
    """The hash of a plan's script; None for a recipe, and for a script that cannot be read here."""
    if plan.script is None:
        return None
    try:
        return sha256(plan.script.file)
    except OSError:
        # The script may be in a container, for example.
        return None


def changed_script(events: Sequence[Event], now: str | None) -> tuple[str, str] | None:
    """The script's hash in the last attempt and now, if both are known and differ."""
    starts = [event.script for event in events if isinstance(event, StartEvent)]
    before = starts[-1] if starts else None
    return (before, now) if before and now and before != now else None
