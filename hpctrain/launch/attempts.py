"""The attempts of one run: what the next one begins from, and that there is one at a time."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shlex
import shutil
import socket
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from hpctrain.checkpoints import newest_checkpoint
from hpctrain.errors import HpctrainError
from hpctrain.events import Event, read_events
from hpctrain.plan import Plan
from hpctrain.records import read_records
from hpctrain.rundir import RunDirectory

_SQUEUE_SECONDS = 20.0
# File systems that have no locks between hosts, or none at all.
_NO_LOCKS = frozenset((errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP))


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """One start of a run.

    Attributes:
        number: 1 for the first.
        iteration: of the checkpoint that it goes on from, 0 for the beginning.
        damaged: what is wrong with newer checkpoints, which are passed over.
    """

    number: int = 1
    iteration: int = 0
    damaged: tuple[str, ...] = ()

    def start(self, plan: Plan, launcher: str) -> Event:
        """What the event ``start`` says."""
        return {
            "attempt": self.number,
            "iteration": self.iteration,
            "job": os.environ.get("SLURM_JOB_ID"),
            "launcher": launcher,
            "hosts": [host.host for host in plan.hosts],
            "host": socket.gethostname(),
            "pid": os.getpid(),
        }


def resume_command(directory: RunDirectory) -> str:
    """What a user types to go on with a run."""
    return shlex.join(["hpctrain", "run", "--resume", "--run-dir", str(directory.path)])


@contextlib.contextmanager
def hold(directory: RunDirectory) -> Iterator[None]:
    """Be the only launcher of a run.

    A lock on ``RUN_DIR/lock`` tells launchers on hosts whose file system has locks between them; the records tell ranks
    on this host that outlived their launcher; Slurm tells a job of before that still runs. What lives on another host,
    outside of Slurm, on a file system without such locks, cannot be seen.

    Raises:
        HpctrainError: another launcher, its ranks or its job are still there.
    """
    path = directory.path / "lock"
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as error:
        raise HpctrainError(f"cannot open {path}: {error.strerror}", "is this a run directory?") from error
    try:
        _lock(descriptor, directory)
        _require_nobody(directory)
        yield
    finally:
        os.close(descriptor)


def _lock(descriptor: int, directory: RunDirectory) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        holder = os.read(descriptor, 500).decode(errors="replace").strip()
        raise HpctrainError(
            f"{directory.path} is being run by another hpctrain: {holder or 'unknown'}", "wait for its end, or stop it"
        ) from error
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
    # For whoever is refused; a full disk is found by what follows.
    with contextlib.suppress(OSError):
        os.truncate(descriptor, 0)
        os.pwrite(descriptor, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)


def _require_nobody(directory: RunDirectory) -> None:
    """Refuse where the attempt of before is still going on without its launcher."""
    alive = [(record, record.process()) for record in read_records(directory).values()]
    if running := [process.pid for record, process in alive if process and record.status == "running"]:
        numbers = " ".join(map(str, running))
        raise HpctrainError(
            f"{directory.path}: ranks of the last attempt still run on this host, though their launcher is gone: "
            f"process {numbers}",
            f"wait for their end, or end them: kill {numbers}",
        )
    starts = [event for event in _events(directory) if event["event"] == "start"]
    job = starts[-1].get("job") if starts else None
    if job and job != os.environ.get("SLURM_JOB_ID") and _is_running(str(job)):
        raise HpctrainError(
            f"{directory.path}: the job of its last attempt still runs: {job}", f"wait for its end, or: scancel {job}"
        )


def _is_running(job: str) -> bool:
    """Whether Slurm says so; a Slurm that is not there or does not answer says nothing."""
    if shutil.which("squeue") is None or not job.isdigit():
        return False
    command = ["squeue", "--noheader", f"--jobs={job}", "--states=RUNNING,COMPLETING,SUSPENDED", "--format=%T"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_SQUEUE_SECONDS)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return bool(answer.stdout.strip())


def next_attempt(directory: RunDirectory, idle_restarts: int) -> Attempt | None:
    """How the run goes on: from the beginning, from its newest whole checkpoint, or, where it is done, not at all.

    Args:
        directory: with a plan; one that was only submitted yet has no attempt.
        idle_restarts: how often a run may begin again without having got further.

    Raises:
        HpctrainError: no checkpoint is left, or the run does not get any further.
    """
    events = _events(directory)
    starts = [event for event in events if event["event"] == "start"]
    if not starts:
        return Attempt()
    if events[-1]["event"] == "end" and events[-1]["status"] == "done":
        return None
    iteration, damaged = newest_checkpoint(directory.checkpoints)
    written = [event for event in events if event["event"] == "checkpoint"]
    if written and not iteration:
        faults = "; ".join(damaged) or f"{directory.checkpoints} is empty"
        raise HpctrainError(
            f"{directory.path}: a checkpoint was written at step {written[-1]['iteration']}, and none can be read: "
            f"{faults}",
            "restore that folder, or begin a new run with another --run-dir",
            exit_code=1,
        )
    _require_progress(directory, events, iteration, idle_restarts)
    return Attempt(number=len(starts) + 1, iteration=iteration, damaged=damaged)


def _require_progress(directory: RunDirectory, events: Sequence[Event], iteration: int, idle_restarts: int) -> None:
    """Refuse to begin for ever where nothing comes of it.

    A script's steps are not known: one that stopped in good order is taken to have got further.
    """
    idle, last = 0, ""
    for attempt in reversed(_attempts(events)):
        faults = [event["message"] for event in attempt if event["event"] == "fault"]
        stopped = not faults and attempt[-1].get("status") == "resumable"
        if attempt[0]["iteration"] != iteration or stopped:
            break
        last = last or "".join(f"; what went wrong: {fault}" for fault in faults[-1:])
        idle += 1
    if idle > idle_restarts:
        raise HpctrainError(
            f"{directory.path}: the last {idle} attempts began at step {iteration} and got no further{last}",
            f"mend the cause, then: {resume_command(directory)} --idle-restarts {idle}",
            exit_code=1,
        )


def _attempts(events: Sequence[Event]) -> list[list[Event]]:
    """The events cut at each start, which the first of them is."""
    parts: list[list[Event]] = []
    for event in events:
        if event["event"] == "start":
            parts.append([])
        parts[-1].append(event)
    return parts


def _events(directory: RunDirectory) -> list[Event]:
    """What happened to the run as a whole, from its first start on."""
    if not directory.events.exists():
        return []
    kinds = ("start", "checkpoint", "fault", "end")
    found = [event for event in read_events(directory.events) if event["event"] in kinds]
    first = next((index for index, event in enumerate(found) if event["event"] == "start"), len(found))
    return found[first:]
