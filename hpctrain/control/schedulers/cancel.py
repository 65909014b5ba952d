"""Ends a run: cancels its jobs, or stops its launcher if it has none."""

from __future__ import annotations

import contextlib
import signal
import socket
import time
from collections.abc import Iterator

import psutil

from hpctrain.common.errors import HpctrainError
from hpctrain.common.files.printable import shell_word
from hpctrain.common.run.directory import RunDirectory, read_model
from hpctrain.common.run.events.kinds import StartEvent
from hpctrain.common.run.plan import Plan, Stop
from hpctrain.common.run.records import living_process, ranks_listen, read_records, works_in
from hpctrain.common.run.stopping import CANCELLED, ask
from hpctrain.control.schedulers.run_jobs import jobs_of
from hpctrain.control.schedulers.submission import scheduler_of

_ANSWER_SECONDS = 30.0
# Slurm's own time between SIGTERM and SIGKILL is 30 s by default; a waiting job ends at once.
_END_SECONDS = 45.0
_POLL_SECONDS = 0.5


def cancel_jobs(directory: RunDirectory) -> Iterator[str]:
    """Cancel all live jobs of a run and wait until they have ended; yields a line for each action.

    A job in which the user started the run by hand is not cancelled.

    Raises:
        HpctrainError: the scheduler refuses or does not answer.
    """
    if any(not job.waits for job in jobs_of(directory, seconds=_ANSWER_SECONDS) if job.live):
        yield from _wait_for_save(directory)
    # The run may have submitted another job meanwhile, or gone back to the queue.
    jobs = [job for job in jobs_of(directory, seconds=_ANSWER_SECONDS) if job.live]
    numbers = sorted({job.id for job in jobs})
    if not numbers:
        return
    scheduler_of(directory).cancel(numbers)
    for job in jobs:
        yield f"cancelled job {job.id}, which was {job.state}{f' on {job.nodes}' if job.nodes else ''}"
    deadline = time.monotonic() + _END_SECONDS
    while left := [job for job in jobs_of(directory, seconds=_ANSWER_SECONDS) if job.live and job.id in numbers]:
        if time.monotonic() > deadline:
            names = ", ".join(job.id for job in left)
            yield f"after {_END_SECONDS:g} s, job {names} is still ending; the scheduler continues with that"
            return
        time.sleep(_POLL_SECONDS)


def _wait_for_save(run: RunDirectory) -> Iterator[str]:
    """Ask ranks that react to stop requests, on any host, to save their state and leave, and wait for that."""
    if run.summary.exists() or not ranks_listen(run):
        return
    with contextlib.suppress(HpctrainError):
        ask(run.stop, CANCELLED, replace=True)
    seconds = Stop().seconds
    # A damaged plan must not keep its job from being cancelled.
    with contextlib.suppress(HpctrainError):
        seconds = read_model(run.plan, Plan).stop.seconds
    yield f"asked the ranks to save their state and leave; waiting up to {seconds:g} s for that"
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and not run.summary.exists():
        time.sleep(_POLL_SECONDS)


def stop_launcher(directory: RunDirectory, start: StartEvent | None, seconds: float) -> Iterator[str]:
    """Ask the launcher of a ``start`` event to stop the run and wait for it; yields a line for each action.

    A launcher on another host gets no signal, but its ranks see the file ``stop``, after which it ends by itself.

    Args:
        start: the run's last one; None for a run without one.
        seconds: how long the launcher may take.

    Raises:
        HpctrainError: the launcher is on another host and has not ended, or ranks run without one; with the commands
            that end them, and on which host.
    """
    if start is None or start.pid is None:
        _require_ended(directory)
        return
    host, pid = start.host, start.pid
    here = host == socket.gethostname()
    process = launcher_process(start) if here else None
    # Checked because a forged event could name any process.
    if process is None or not works_in(process, directory.path):
        # The launcher ended with its job, which left it no time to record that.
        if start.job and not _lives(directory, start.job):
            return
        if here:
            _require_ended(directory)
            return
        yield from _wait_for_save(directory)
        if directory.summary.exists():
            return
        hint = f"on {host}, run: hpctrain cancel {shell_word(directory.path.absolute())}, or: kill {pid}"
        raise HpctrainError(
            "HT-cancel-not-possible",
            "the run was started on {host}, not in a job of its own, and goes on there",
            hint,
            exit_code=1,
            host=host,
        )
    try:
        # Says why SIGTERM comes; a launcher that cannot be told ends all the same.
        with contextlib.suppress(HpctrainError):
            ask(directory.stop, CANCELLED, replace=True)
        process.send_signal(signal.SIGTERM)
        yield f"asked the launcher, process {pid}, to stop"
        process.wait(seconds)
    except psutil.NoSuchProcess:
        return
    except psutil.TimeoutExpired:
        yield f"after {seconds:g} s it is still stopping; `kill {pid}` once more ends every process at once"


def _lives(directory: RunDirectory, job: str) -> bool:
    user = directory.path.stat().st_uid
    return any(state.live for state in scheduler_of(directory).list([job], user=user, seconds=_ANSWER_SECONDS))


def _require_ended(directory: RunDirectory) -> None:
    """Refuse to report that nothing runs while there are ranks that no launcher of hpctrain will stop.

    Processes on other hosts cannot be seen from here, so their ranks count as running until their records end.

    Raises:
        HpctrainError: such ranks run, or a rank's record cannot be read.
    """
    unread: list[HpctrainError] = []
    records = read_records(directory, unread).values()
    here = socket.gethostname()
    began = [record for record in records if record.status == "running"]
    running = [record for record in began if record.host != here or record.own_process(directory)]
    if running:
        pids: dict[str, list[str]] = {}
        for record in running:
            pids.setdefault(record.host, []).append(str(record.pid))
        ends = "; ".join(f"on {host}: kill {' '.join(pids[host])}" for host in sorted(pids))
        raise HpctrainError(
            "HT-cancel-not-possible",
            "ranks of the run may still run, without a launcher: {ranks}",
            ends,
            exit_code=1,
            ranks=", ".join(str(record.rank) for record in running),
        )
    if unread:
        raise unread[0]


def launcher_process(start: StartEvent) -> psutil.Process | None:
    """The launcher of a ``start`` event if it lives on this host, and not a later process with its number."""
    if start.host is None or start.pid is None:
        return None
    return living_process(start.host, start.pid, start.time)
