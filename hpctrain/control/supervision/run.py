"""Starts a plan's ranks, follows them, and ends them in every case."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import psutil

from hpctrain.common.errors import HpctrainError
from hpctrain.common.run.directory import RunDirectory
from hpctrain.common.run.events import EventWriter
from hpctrain.common.run.events.kinds import StartEvent
from hpctrain.common.run.open_directory import HeldDirectory
from hpctrain.common.run.plan import Plan, Stop
from hpctrain.common.run.processes import works_in
from hpctrain.common.run.records import RankRecord, ranks_listen, read_records
from hpctrain.common.run.stopping import CANCELLED, RESUMABLE, ask, reason_in
from hpctrain.common.settings import TIMEOUT, TIMEOUT_HINT
from hpctrain.control.launchers.command import Command
from hpctrain.control.launchers.open_mpi_folder import OpenMpiFolder, own_folder, remove_leftovers
from hpctrain.control.launchers.shortages import shortages
from hpctrain.control.supervision.audience import Audience
from hpctrain.control.supervision.failure import LOG_LINES, Failure, find_failure, signal_name
from hpctrain.control.supervision.follow import Follower
from hpctrain.control.supervision.interrupts import Interrupts

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


@dataclass(frozen=True, kw_only=True)
class LiveRun:
    """A run that this process carries out: its directory, held; where its signals are collected; and who is told."""

    held: HeldDirectory
    interrupts: Interrupts
    audience: Audience

    @property
    def directory(self) -> RunDirectory:
        """The directory, under the name that it had at first."""
        return self.held.named


@dataclass(frozen=True, kw_only=True)
class RankRules:
    """What is expected of the ranks of a run, and how they are stopped.

    Attributes:
        ranks: how many have to record that they are done.
        stoppable: they stop at any signal; otherwise at those that ask for it, and at others if their records say so.
        resumable: the run can be resumed though no rank shows that it can stop.
        fault_tolerant: they go on without one that died, and say so in its record.
        meet_seconds: how long each waits at most for the next to begin, and for all to meet; None for no limit.
    """

    ranks: int
    stop: Stop = field(default_factory=Stop)
    stoppable: bool = False
    resumable: bool = False
    fault_tolerant: bool = False
    meet_seconds: float | None = None

    @classmethod
    def of(cls, plan: Plan) -> RankRules:
        """The rules of a plan's ranks."""
        return cls(
            ranks=plan.processes,
            stop=plan.stop,
            stoppable=plan.recipe is not None,
            # Asking for restarts declares the script resumable.
            resumable=plan.restarts > 0,
            fault_tolerant=plan.fault_tolerant,
            # A script may do anything before its ranks meet, so only recipes have a limit.
            meet_seconds=TIMEOUT.read() if plan.recipe and plan.processes > 1 else None,
        )


def run_ranks(
    command: Command,
    run: LiveRun,
    rules: RankRules,
    start: StartEvent,
    leave: Callable[[], str | None] = lambda: None,
) -> Failure | None:
    """Run a command to its end; none of its processes is alive when this returns.

    Args:
        run: its directory holds its plan.
        leave: says why the ranks are to save their state and leave; None while they are not.

    Returns:
        None if every rank that was not lost on the way is done, else the first cause that is known.

    Raises:
        HpctrainError: the program cannot be started.
    """
    with EventWriter(run.directory.events) as events:
        follower = Follower(run.directory, run.audience)
        events.emit(start)
    for path in remove_leftovers() if command.own_folder else ():
        run.audience.notice(f"removed {path}, the shared memory of a run that was killed")
    with own_folder(command.own_folder) as folder:
        job = RunningJob(command, run, rules, folder)
        failure = _run(job, follower, leave)
    return failure and _lost_directory_failure(failure, job)


def _run(job: RunningJob, follower: Follower, leave: Callable[[], str | None]) -> Failure | None:
    interrupts, rules, notice = job.run.interrupts, job.rules, job.run.audience.notice
    seconds = rules.stop.seconds
    waits = listens = False
    ended: int | None = None
    try:
        cut = job.wait(follower, lambda: bool(interrupts.received), leave)
        if cut and not job.lost and not interrupts.received:
            # No limit here: nothing ends the job soon, so the step and its checkpoint may take their time.
            _ask_to_leave(job.directory, leave() or "", notice)
            cut = job.wait(follower, lambda: bool(interrupts.received))
        if cut and job.lost and not interrupts.received:
            _ask_in_moved_directory(job, follower)
            deadline = time.monotonic() + seconds
            cut = job.wait(follower, lambda: bool(interrupts.received) or time.monotonic() > deadline)
        ended = job.process.poll()
        if cut and interrupts.received:
            job.follow_moved_directory(follower)
            listens = rules.stoppable or ranks_listen(job.directory)
            # A script that does not listen gets Ctrl-C as a KeyboardInterrupt, as in a program of its own.
            waits = listens or interrupts.received[0] in (*interrupts.asking, signal.SIGINT)
            if waits and _ask_to_stop(job.directory, interrupts.received[0], seconds, notice):
                deadline = time.monotonic() + seconds
                cut = job.wait(follower, lambda: interrupts.second_signal or time.monotonic() > deadline)
    finally:
        job.stop(interrupts)
    job.follow_moved_directory(follower)
    follower.advance(last=True)
    failure = find_failure(
        job.directory,
        rules.ranks,
        output=job.output(),
        exit_status=job.exit_status,
        first_dead=job.first_dead,
        fault_tolerant=rules.fault_tolerant,
    )
    if failure and failure.printed:
        failure = replace(failure, shown=job.run.audience.shown(failure.printed))
    if job.never_met and not (failure and failure.lost_hosts):
        failure = job.never_met
    if failure and _is_unexplained(failure, job):
        failure = _with_shortages(failure, job)
    if failure and interrupts.received:
        exit_code = RESUMABLE if waits or rules.resumable else 1
        what = "all ranks saved their state and left" if listens else "all ranks have left"
        by = CANCELLED if _cancelled(job.directory) else f"interrupted by {interrupts.received[0].name}"
        return _interrupted(failure, by, what, cut=cut, exit_code=exit_code)
    if failure and failure.stopped and ended is not None and ended < 0 and ended != -signal.SIGTERM:
        return _lost_launcher(failure, -ended)
    return failure


def _ask_in_moved_directory(job: RunningJob, follower: Follower) -> None:
    """Ask the ranks of a run whose directory was moved to save their state there, and follow them there."""
    seconds = job.rules.stop.seconds
    job.run.audience.notice(f"warning: {job.lost}: waiting up to {seconds:g} s for the ranks to end")
    job.follow_moved_directory(follower)
    # The ranks notice the move by themselves, but sometimes later.
    with contextlib.suppress(HpctrainError):
        ask(job.directory.stop, str(job.lost))


def _lost_directory_failure(failure: Failure, job: RunningJob) -> Failure:
    """The failure of a run whose directory was moved or deleted, which is also the cause of the ranks' own errors."""
    if not job.lost:
        return failure
    if job.run.held.now() is None or not read_records(job.directory):
        return lost_directory(job.run.held, job.lost)
    ended = "all ranks saved their state and left" if failure.stopped else failure.message
    return replace(failure, message=f"{job.lost}; {ended}")


def lost_directory(held: HeldDirectory, fate: str) -> Failure:
    """The failure of a run whose directory was deleted, or was moved before any rank began."""
    if held.now() is None:
        hint = "start it anew: nothing of it can be saved any more"
        return Failure(code="HT-run-directory-deleted", message=fate, hint=hint, exit_code=1)
    return Failure(code="HT-run-directory-moved", message=fate, exit_code=RESUMABLE)


def _is_unexplained(failure: Failure, job: RunningJob) -> bool:
    """Whether neither a rank nor the launcher has recorded a cause."""
    known = failure.hint or failure.stopped or failure.lost_hosts or job.lost
    return not known and all(record.status != "failed" for record in read_records(job.directory).values())


def _with_shortages(failure: Failure, job: RunningJob) -> Failure:
    """The failure with what this host lacks, which comes first where that can be the cause: no rank had met the others.

    MPI itself reports a shortage as an internal error, or not at all.
    """
    found = list(shortages(temporary=job.folder is None, run=job.directory.path))
    if not found:
        return failure
    faults = "; ".join(shortage.fault for shortage in found)
    remedies = "\n  ".join(shortage.remedy for shortage in found)
    if job.rules.ranks == 1 or any(record.joined for record in read_records(job.directory).values()):
        return replace(failure, hint=f"{faults}\n  {remedies}")
    return replace(failure, code="HT-host-shortage", message=f"{faults}; {failure.message}", hint=remedies)


def _lost_launcher(failure: Failure, by: int) -> Failure:
    """The failure where the launcher was killed: the ranks take its loss for a request to stop."""
    message = (
        f"the program that started the ranks was killed by signal {by} ({signal_name(by)}); they saved their state"
    )
    return replace(failure, code="HT-launcher-killed", message=message, stopped=False)


def _ask_to_leave(directory: RunDirectory, reason: str, notice: Callable[[str], None]) -> None:
    """Ask the ranks to save their state and leave, after which they are started again."""
    try:
        if not ask(directory.stop, reason):
            # The user has already asked them to stop.
            return
    except HpctrainError as error:
        notice(f"warning: {reason}, and the ranks cannot be told: {error.message}")
        return
    notice(f"{reason}: the ranks end their step, save their state, leave, and are started again")


def _ask_to_stop(directory: RunDirectory, by: signal.Signals, seconds: float, notice: Callable[[str], None]) -> bool:
    """Ask the ranks to stop; returns whether they could be asked."""
    try:
        ask(directory.stop, by.name)
    except HpctrainError as error:
        notice(f"{by.name}: {error.message}; every process is ended")
        return False
    notice(
        f"{by.name}: waiting up to {seconds:g} s for the ranks to end their step and save their state; "
        "the second SIGINT or SIGTERM ends them at once"
    )
    return True


def _cancelled(directory: RunDirectory) -> bool:
    try:
        return reason_in(directory.stop) == CANCELLED
    except OSError:
        return False


def _interrupted(failure: Failure, by: str, what: str, *, cut: bool, exit_code: int) -> Failure:
    """The outcome of an interrupted run: the ranks stopped by themselves, or were ended with ``exit_code``."""
    # The ranks' own account comes first: they may have saved their state and hung afterwards.
    if failure.stopped:
        message = f"{by}; {what}"
        return replace(failure, code="HT-run-interrupted", message=message)
    if cut:
        message = f"{by}; every process was ended"
        return Failure(code="HT-run-interrupted", message=message, exit_code=exit_code)
    return failure


class RunningJob:
    """The processes of one run, in their own session.

    ``first_dead`` is the rank that was seen dead, without an error recorded, while others lived that cannot go on
    without it. ``never_met`` is the failure of ranks that have waited for too long until all were there. ``lost`` is
    what became of the run's directory, once it is not where it was.
    """

    def __init__(self, command: Command, run: LiveRun, rules: RankRules, folder: OpenMpiFolder | None = None) -> None:
        self.run = run
        self.rules = rules
        self.directory = run.directory
        self.folder = folder
        self.lost: str | None = None
        self._output = b""
        self.first_dead: int | None = None
        self.never_met: Failure | None = None
        self._meet_seconds = rules.meet_seconds
        # The ranks' own processes, by rank, and others that their records named.
        self._own: dict[int, int] = {}
        self._foreign: set[tuple[int, int]] = set()
        self._warned_ranks: set[int] = set()
        self._began, self._since = 0, time.monotonic()
        self.process = command.start(folder)
        assert self.process.stdout is not None
        os.set_blocking(self.process.stdout.fileno(), False)

    @property
    def exit_status(self) -> int:
        """The launcher's exit status, or that of SIGKILL if it does not end even then, perhaps waiting for a disk."""
        status = self.process.poll()
        return -signal.SIGKILL if status is None else status

    def wait(
        self, follower: Follower, enough: Callable[[], bool], leave: Callable[[], str | None] = lambda: None
    ) -> bool:
        """Follow until the launcher ends, until it hangs after its ranks have ended, or until ``enough`` is true.

        Args:
            enough: returns whether to stop following.
            leave: says why the ranks are to leave; it is asked only while they work.

        Returns:
            Whether ranks that had not failed still ran when it was enough or the directory was lost.
        """
        deadline, known = None, self.lost
        turns = itertools.count()
        while self.process.poll() is None:
            if enough() or (deadline is None and leave()):
                return deadline is None
            follower.advance()
            self.output()
            if deadline is None and next(turns) % max(_POLLS_A_LOOK, self.rules.ranks // 10) == 0:
                self.lost = self.lost or self.run.held.lost()
                if self.lost != known:
                    return True
                grace = self._grace(self._records())
                deadline = None if grace is None else time.monotonic() + grace
            if deadline is not None and time.monotonic() > deadline:
                break
            time.sleep(_POLL_SECONDS)
        return False

    def follow_moved_directory(self, follower: Follower) -> None:
        """Go on with the directory where it is now, if it was moved."""
        if not (fate := self.run.held.fate()):
            return
        self.lost = self.lost or fate
        if now := self.run.held.now():
            self.directory = now
            follower.move_to(now)

    def output(self) -> str:
        """The end of the launcher's own output so far."""
        assert self.process.stdout is not None
        while part := self.process.stdout.read():
            self._output = (self._output + part)[-_OUTPUT_BYTES:]
        return self._output.decode(errors="replace")

    def stop(self, interrupts: Interrupts) -> None:
        """End every process that is alive: with SIGTERM first, and after a time or a second interrupt with SIGKILL."""
        members = self._members()
        interrupted = len(interrupts.received)
        self._signal(members, signal.SIGTERM)
        begin = time.monotonic()
        deadline, again = begin + _TERMINATE_SECONDS, begin + _AGAIN_SECONDS
        while time.monotonic() < deadline and len(interrupts.received) == interrupted:
            self.output()
            _, members = psutil.wait_procs(members, timeout=_POLL_SECONDS)
            if not members and self.process.poll() is not None:
                break
            if time.monotonic() > again:
                # A rank takes the first SIGTERM as a request to end its step. Only ranks get a second one: at the
                # second, Open MPI's launcher abandons its ranks.
                again = deadline
                _send_all(members, signal.SIGTERM)
        # Again from the start: a launcher may have been starting ranks when it got the signal.
        members = [*members, *self._members()]
        self._signal(members, signal.SIGKILL)
        psutil.wait_procs(members, timeout=_KILL_SECONDS)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(timeout=_KILL_SECONDS)

    def _signal(self, members: list[psutil.Process], number: signal.Signals) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, number)
        _send_all(members, number)

    def _records(self) -> list[RankRecord]:
        """The records that can be read, without those that name processes which are not the run's."""
        return [record for record in read_records(self.directory).values() if not self._names_foreign_process(record)]

    def _names_foreign_process(self, record: RankRecord) -> bool:
        """Whether a record names a process of this host that is not the rank's; warns once for each rank."""
        named = record.rank, record.pid
        # Checked once for each rank: a process that ends closes the directory before it is gone.
        if record.rank not in self._own and record.status == "running" and (process := record.process()):
            if works_in(process, self.run.held.work.path):
                self._own[record.rank] = record.pid
            else:
                self._foreign.add(named)
        if named not in self._foreign and self._own.get(record.rank, record.pid) == record.pid:
            return False
        if record.rank not in self._warned_ranks:
            self._warned_ranks.add(record.rank)
            self.run.audience.notice(
                f"warning: {self.directory.rank(record.rank)} names process {record.pid}, which is not one of this "
                f"run's: nothing is concluded from what it says of rank {record.rank}"
            )
        return True

    def _grace(self, records: list[RankRecord]) -> float | None:
        """How long the launcher has to end by itself; None while its ranks work."""
        if any(record.status == "failed" for record in records):
            return _FAILURE_GRACE_SECONDS
        if self._meet_seconds is not None:
            self._check_start(records, self._meet_seconds)
        if self.never_met:
            return 0.0
        if len(records) == self.rules.ranks and not any(record.status == "running" for record in records):
            return _KILL_SECONDS if self.run.interrupts.received else _FINALIZE_SECONDS
        dead = [record.rank for record in records if record.vanished]
        if self.rules.fault_tolerant and any(
            record.status == "running" and record.rank not in dead for record in records
        ):
            # The ranks that are left report how the run ends.
            return None
        # Where all are dead the launcher has ended the job, and which rank died first is not known.
        if dead and len(dead) < len(records):
            self.first_dead = dead[0]
        return _FAILURE_GRACE_SECONDS if dead else None

    def _check_start(self, records: list[RankRecord], seconds: float) -> None:
        """Find ranks that have waited too long for the others to begin, as MPI's own start has no limit."""
        if any(record.joined for record in records):
            self._meet_seconds = None
        elif len(records) > self._began:
            self._began, self._since = len(records), time.monotonic()
        elif time.monotonic() - self._since > seconds:
            known = {record.rank for record in records}
            missing = [str(rank) for rank in range(self.rules.ranks) if rank not in known]
            what = f"rank {', '.join(missing)} did not begin" if missing else "the ranks did not find each other"
            self.never_met = Failure(
                code="HT-ranks-did-not-meet",
                message=f"{what} within {seconds:g} s",
                lines=tuple(line for line in self.output().splitlines() if line.strip())[-LOG_LINES:],
                exit_code=RESUMABLE,
                passing=True,
                hint=TIMEOUT_HINT,
            )

    def _members(self) -> list[psutil.Process]:
        """The launcher's descendants, the members of its session, and the ranks, which may have outlived it."""
        # A damaged record must not spare the other processes, and a forged one must not end any. The directory is
        # found by its descriptor, because it may have been moved just now.
        directory = self.run.held.work
        recorded = (record.own_process(directory) for record in read_records(directory).values())
        members = {process for process in recorded if process}
        if self.process.poll() is None:
            members.update(psutil.Process(self.process.pid).children(recursive=True))
        # The process number of an ended launcher is not reused while a process of its session lives.
        if self.process.poll() is None or not psutil.pid_exists(self.process.pid):
            members.update(process for process in psutil.process_iter() if _session(process) == self.process.pid)
        return [process for process in members if process.pid != self.process.pid]


def _send_all(members: list[psutil.Process], number: signal.Signals) -> None:
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
