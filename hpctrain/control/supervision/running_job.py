"""The processes of one attempt: who of them is alive, how long the rest may take, and their end."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import subprocess
import time
from collections.abc import Callable, Sequence

import psutil

from hpctrain.common.run.directory import RunDirectory
from hpctrain.common.run.plan import Plan
from hpctrain.common.run.records import RankRecord, read_records, works_in
from hpctrain.common.run.stopping import RESUMABLE
from hpctrain.common.settings import TIMEOUT, TIMEOUT_HINT
from hpctrain.control.supervision.audience import LiveRun
from hpctrain.control.supervision.failure import LOG_LINES, Failure
from hpctrain.control.supervision.follow import Follower

_POLL_SECONDS = 0.1
# Each rank has a record file, perhaps on a shared file system: at most a hundred of them are read each second.
_POLLS_A_LOOK = 10
# After one rank failed or died the launcher ends the others by itself, but Intel MPI's does not always. A script's exit
# handlers have ten seconds before that.
_FAILURE_GRACE_SECONDS = 15.0
# After its last record a rank still runs its exit handlers, and a launcher leaves MPI with all ranks or never.
_FINALIZE_SECONDS = 60.0
_TERMINATE_SECONDS = 10.0
_AGAIN_SECONDS = 1.0
_KILL_SECONDS = 5.0
# The end of the launcher's own output is where it names the rank that died.
_OUTPUT_BYTES = 65536


class RunningJob:
    """The processes of one attempt, in a session of their own.

    Attributes:
        directory: of the run, by its descriptor while the processes run, which a rename does not change.
        lost: what became of the directory, once it is not where it was.
        first_dead: the rank that was seen dead, without an error recorded, while others lived that cannot go on without
            it.
        never_met: the failure of ranks that have waited for too long until all were there.
    """

    def __init__(self, process: subprocess.Popen[bytes], run: LiveRun, plan: Plan) -> None:
        self.process = process
        self.directory = run.held.work
        self.lost: str | None = None
        self.first_dead: int | None = None
        self.never_met: Failure | None = None
        self._held, self._interrupts, self._notice = run.held, run.interrupts, run.audience.notice
        self._ranks, self._fault_tolerant = plan.processes, plan.fault_tolerant
        # How long ranks may wait until all are there. A script may do anything before, so only recipes have a limit.
        self._meet_seconds = TIMEOUT.read() if plan.recipe and plan.processes > 1 else None
        self._output = b""
        # Of each rank the process that proved to be its own, and the others that its record has named.
        self._own: dict[int, int] = {}
        self._foreign: set[tuple[int, int]] = set()
        # How many ranks have begun, and since when it was no more.
        self._begun, self._since = 0, time.monotonic()
        assert process.stdout is not None
        os.set_blocking(process.stdout.fileno(), False)

    @property
    def exit_status(self) -> int:
        """The launcher's exit status, or that of SIGKILL if it does not end even then, perhaps waiting for a disk."""
        status = self.process.poll()
        return -signal.SIGKILL if status is None else status

    def wait(self, follower: Follower, enough: Callable[[], bool]) -> bool:
        """Follow until the launcher ends, until it hangs after its ranks have ended, or until ``enough`` is true.

        Returns:
            Whether ranks that had not failed still ran when it was enough, or when the directory was lost.
        """
        deadline: float | None = None
        for turn in itertools.count():
            if self.process.poll() is not None:
                return False
            if enough():
                return deadline is None
            follower.advance()
            self.output()
            if deadline is None and turn % max(_POLLS_A_LOOK, self._ranks // 10) == 0:
                if not self.lost and (fate := self._held.lost()):
                    self.lost = fate
                    return True
                grace = self._grace()
                deadline = None if grace is None else time.monotonic() + grace
            if deadline is not None and time.monotonic() > deadline:
                return False
            time.sleep(_POLL_SECONDS)
        raise AssertionError

    def output(self) -> str:
        """The end of the launcher's own output so far."""
        assert self.process.stdout is not None
        while part := self.process.stdout.read():
            self._output = (self._output + part)[-_OUTPUT_BYTES:]
        return self._output.decode(errors="replace")

    def _grace(self) -> float | None:
        """How long the launcher has to end by itself; None while its ranks work."""
        records = [record for record in read_records(self.directory).values() if not self._is_foreign(record)]
        if any(record.status == "failed" for record in records):
            return _FAILURE_GRACE_SECONDS
        self._check_start(records)
        if self.never_met:
            return 0.0
        if len(records) == self._ranks and not any(record.status == "running" for record in records):
            return _KILL_SECONDS if self._interrupts.received else _FINALIZE_SECONDS
        dead = [record.rank for record in records if record.vanished]
        alive = [record.rank for record in records if record.status == "running" and record.rank not in dead]
        if self._fault_tolerant and alive:
            # The ranks that are left report how the run ends.
            return None
        # Where all are dead the launcher has ended the job, and which rank died first is not known.
        if dead and len(dead) < len(records):
            self.first_dead = dead[0]
        return _FAILURE_GRACE_SECONDS if dead else None

    def _is_foreign(self, record: RankRecord) -> bool:
        """Whether a record names a process of this host that is not the rank's; said once."""
        rank, named = record.rank, (record.rank, record.pid)
        # A process that ends closes the directory before it is gone, so the proof is kept.
        if rank not in self._own and record.status == "running" and (process := record.process()):
            if works_in(process, self._held.work.path):
                self._own[rank] = record.pid
            else:
                self._notice_foreign(record)
        return named in self._foreign or self._own.get(rank, record.pid) != record.pid

    def _notice_foreign(self, record: RankRecord) -> None:
        named = record.rank, record.pid
        if named not in self._foreign:
            self._foreign.add(named)
            self._notice(
                f"warning: {self._held.named.rank(record.rank)} names process {record.pid}, which is not one of this "
                f"run's: nothing is concluded from what it says of rank {record.rank}"
            )

    def _check_start(self, records: Sequence[RankRecord]) -> None:
        """Find ranks that have waited too long for the others to begin, as MPI's own start has no limit."""
        if self._meet_seconds is None or any(record.joined for record in records):
            self._meet_seconds = None
        elif len(records) > self._begun:
            self._begun, self._since = len(records), time.monotonic()
        elif time.monotonic() - self._since > self._meet_seconds:
            known = {record.rank for record in records}
            missing = [str(rank) for rank in range(self._ranks) if rank not in known]
            late = f"rank {', '.join(missing)} did not begin" if missing else "the ranks did not find each other"
            self.never_met = Failure(
                code="HT-ranks-did-not-meet",
                message=f"{late} within {self._meet_seconds:g} s",
                lines=tuple(line for line in self.output().splitlines() if line.strip())[-LOG_LINES:],
                exit_code=RESUMABLE,
                passing=True,
                hint=TIMEOUT_HINT,
            )

    def stop(self) -> None:
        """End every process that is alive; a further interrupt shortens the time that they have."""
        interrupted = len(self._interrupts.received)
        end_processes(
            self.process, self.directory, lambda: len(self._interrupts.received) > interrupted, poll=self.output
        )
        # What follows is told to the user, with names where the files are now.
        self.lost = self.lost or self._held.fate()
        self.directory = self._held.now() or self._held.named


def end_processes(
    launcher: subprocess.Popen[bytes],
    directory: RunDirectory,
    hurry: Callable[[], bool] = lambda: False,
    poll: Callable[[], object] = lambda: None,
) -> None:
    """End a launcher and all that it started: with SIGTERM first, and after a time, or in a hurry, with SIGKILL.

    Args:
        directory: its records name ranks that may have outlived the launcher.
        poll: is called again and again while they end.
    """
    members = _members(launcher, directory)
    _signal(launcher, members, signal.SIGTERM)
    begin = time.monotonic()
    deadline, again = begin + _TERMINATE_SECONDS, begin + _AGAIN_SECONDS
    while time.monotonic() < deadline and not hurry():
        poll()
        _, members = psutil.wait_procs(members, timeout=_POLL_SECONDS)
        if not members and launcher.poll() is not None:
            break
        if time.monotonic() > again:
            # A rank takes the first SIGTERM as a request to end its step. Only ranks get a second one: at the second,
            # Open MPI's launcher abandons its ranks.
            again = deadline
            _send_all(members, signal.SIGTERM)
    # Again from the start: a launcher may have been starting ranks when it got the signal.
    members = [*members, *_members(launcher, directory)]
    _signal(launcher, members, signal.SIGKILL)
    psutil.wait_procs(members, timeout=_KILL_SECONDS)
    with contextlib.suppress(subprocess.TimeoutExpired):
        launcher.wait(timeout=_KILL_SECONDS)


def _members(launcher: subprocess.Popen[bytes], directory: RunDirectory) -> list[psutil.Process]:
    """The launcher's descendants, the members of its session, and the ranks, which may have outlived it."""
    # A damaged record must not spare the other processes, and a forged one must not end any.
    recorded = (record.own_process(directory) for record in read_records(directory).values())
    members = {process for process in recorded if process}
    with contextlib.suppress(psutil.NoSuchProcess):
        members.update(psutil.Process(launcher.pid).children(recursive=True) if launcher.poll() is None else ())
    # The process number of an ended launcher is not reused while a process of its session lives.
    if launcher.poll() is None or not psutil.pid_exists(launcher.pid):
        members.update(process for process in psutil.process_iter() if _session(process) == launcher.pid)
    return [process for process in members if process.pid != launcher.pid]


def _signal(launcher: subprocess.Popen[bytes], members: Sequence[psutil.Process], number: signal.Signals) -> None:
    if launcher.poll() is None:
        os.killpg(launcher.pid, number)
    _send_all(members, number)


def _send_all(members: Sequence[psutil.Process], number: signal.Signals) -> None:
    for member in members:
        # A script can have started what runs as another user, as sudo does: that ends by itself, or not at all.
        with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            member.send_signal(number)


def _session(process: psutil.Process) -> int | None:
    """The session of a process that runs; None where it has ended."""
    try:
        session = os.getsid(process.pid)
        return None if process.status() == psutil.STATUS_ZOMBIE else session
    except (psutil.NoSuchProcess, ProcessLookupError):
        return None
