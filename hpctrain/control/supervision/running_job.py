"""One attempt of a run: starts its ranks, follows them, ends them in every case, and says why they are not done."""

from __future__ import annotations

import itertools
import os
import signal
import socket
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

from hpctrain.common.cluster.machine import group_memory
from hpctrain.common.errors import HpctrainError
from hpctrain.common.files.printable import shell_word
from hpctrain.common.run.events import EventWriter
from hpctrain.common.run.events.kinds import StartEvent
from hpctrain.common.run.plan import Plan
from hpctrain.common.run.records import RankRecord, ranks_listen, read_records
from hpctrain.common.run.stopping import CANCELLED, RESUMABLE, ask, is_cancelled
from hpctrain.common.settings import TIMEOUT, TIMEOUT_HINT
from hpctrain.control.launchers.command import Command
from hpctrain.control.launchers.launcher_choice import in_allocation
from hpctrain.control.launchers.processes import end_processes
from hpctrain.control.supervision.audience import LiveRun
from hpctrain.control.supervision.failure import (
    BY_A_SIGNAL,
    LOG_LINES,
    Failure,
    find_failure,
    signal_name,
    with_memory,
    with_recordings,
)
from hpctrain.control.supervision.follow import Follower
from hpctrain.control.supervision.host_questions import killed_for_memory
from hpctrain.control.supervision.interrupts import ASKING

_POLL_SECONDS = 0.1
# Each rank has a record file, perhaps on a shared file system: at most a hundred of them are read each second.
_POLLS_A_LOOK = 10
# After one rank failed or died the launcher ends the others by itself, but Intel MPI's does not always. A script's exit
# handlers have ten seconds before that.
_FAILURE_GRACE_SECONDS = 15.0
# After its last record a rank still runs its exit handlers, and a launcher leaves MPI with all ranks or never.
_FINALIZE_SECONDS = 60.0
_INTERRUPTED_SECONDS = 5.0
# The end of the launcher's own output is where it names the rank that died.
_OUTPUT_BYTES = 65536


def run_ranks(command: Command, run: LiveRun, plan: Plan, start: StartEvent) -> Failure | None:
    """Run a command to its end; none of its processes is alive when this returns.

    Args:
        run: its directory holds the plan.

    Returns:
        None if every rank that was not lost on the way is done, else the first cause that is known.

    Raises:
        HpctrainError: the program cannot be started.
    """
    with EventWriter(run.directory.events) as events:
        follower = Follower(run.directory, run.audience)
        events.emit(start)
    job = RunningJob(command, run, plan, follower)
    try:
        job.follow()
    finally:
        job.stop()
    follower.advance(last=True)
    return job.failure()


class RunningJob:
    """The ranks of one attempt and their launcher, in a session of their own.

    Raises:
        HpctrainError: the program cannot be started.
    """

    def __init__(self, command: Command, run: LiveRun, plan: Plan, follower: Follower) -> None:
        self._plan, self._follower = plan, follower
        self._interrupts, self._notice = run.interrupts, run.audience.notice
        self._directory = run.directory
        # Whether the ranks were ended before they had stopped by themselves, may stop by themselves, and save state.
        self._cut = self._may_stop = self._listen = False
        # The rank that was seen dead, without an error recorded, while others lived that cannot go on without it.
        self._first_dead: int | None = None
        # How long ranks may wait until all are there. A script may do anything before, so only recipes have a limit.
        self._meet_seconds = TIMEOUT.read() if plan.recipe and plan.processes > 1 else None
        self._never_met: Failure | None = None
        # How many ranks have begun, and since when it was no more.
        self._begun, self._since = 0, time.monotonic()
        # The launcher's exit status, where it ended by itself, and the end of its own output.
        self._ended: int | None = None
        self._printed = b""
        self._memory = group_memory()
        # Started last, so that nothing that fails leaves it behind.
        self._process = command.start()
        assert self._process.stdout is not None
        self._stdout = self._process.stdout
        os.set_blocking(self._stdout.fileno(), False)

    def follow(self) -> None:
        """Follow the ranks until they have ended, or have had their time to stop."""
        interrupts, seconds = self._interrupts, self._plan.stop.seconds
        waiting = f"waiting up to {seconds:g} s for the ranks to end their step and save their state"
        self._cut = self._wait(lambda: bool(interrupts.received))
        self._ended = self._process.poll()
        if self._cut and interrupts.received:
            by = interrupts.received[0]
            self._listen = self._plan.recipe is not None or ranks_listen(self._directory)
            # A script that does not listen gets Ctrl-C as a KeyboardInterrupt, as in a program of its own.
            self._may_stop = self._listen or by in ASKING or by == signal.SIGINT
            if self._may_stop and self._ask(by.name):
                self._notice(f"{by.name}: {waiting}; the second SIGINT or SIGTERM ends them at once")
                deadline = time.monotonic() + seconds
                self._cut = self._wait(lambda: interrupts.second_signal or time.monotonic() > deadline)

    def _ask(self, reason: str) -> bool:
        """Ask the ranks to save their state and leave; returns whether they could be asked."""
        try:
            ask(self._directory.stop, reason)
        except HpctrainError as error:
            self._notice(f"warning: {reason}: the ranks cannot be asked to stop: {error.message}")
            return False
        return True

    def _wait(self, enough: Callable[[], bool]) -> bool:
        """Follow until the launcher ends, until it hangs after its ranks have ended, or until ``enough`` is true.

        Returns:
            Whether ranks that had not failed still ran when it was enough.
        """
        deadline: float | None = None
        for turn in itertools.count():
            if self._process.poll() is not None:
                return False
            if enough():
                return deadline is None
            self._follower.advance()
            self._output()
            if deadline is None and turn % max(_POLLS_A_LOOK, self._plan.processes // 10) == 0:
                grace = self._grace()
                deadline = None if grace is None else time.monotonic() + grace
            if deadline is not None and time.monotonic() > deadline:
                return False
            time.sleep(_POLL_SECONDS)
        raise AssertionError

    def _output(self) -> str:
        """The end of the launcher's own output so far."""
        while part := self._stdout.read():
            self._printed = (self._printed + part)[-_OUTPUT_BYTES:]
        return self._printed.decode(errors="replace")

    def _grace(self) -> float | None:
        """How long the launcher has to end by itself; None while its ranks work."""
        records = [*read_records(self._directory).values()]
        if any(record.status == "failed" for record in records):
            return _FAILURE_GRACE_SECONDS
        self._check_start(records)
        if self._never_met:
            return 0.0
        if len(records) == self._plan.processes and not any(record.status == "running" for record in records):
            return _INTERRUPTED_SECONDS if self._interrupts.received else _FINALIZE_SECONDS
        dead = [record.rank for record in records if record.vanished]
        alive = [record.rank for record in records if record.status == "running" and record.rank not in dead]
        if self._plan.fault_tolerant and alive:
            # The ranks that are left report how the run ends.
            return None
        # Where all are dead the launcher has ended the job, and which rank died first is not known.
        if dead and len(dead) < len(records):
            self._first_dead = dead[0]
        return _FAILURE_GRACE_SECONDS if dead else None

    def _check_start(self, records: Sequence[RankRecord]) -> None:
        """Find ranks that have waited too long for the others to begin, as MPI's own start has no limit."""
        if self._meet_seconds is None or any(record.joined for record in records):
            self._meet_seconds = None
        elif len(records) > self._begun:
            self._begun, self._since = len(records), time.monotonic()
        elif time.monotonic() - self._since > self._meet_seconds:
            known = {record.rank for record in records}
            missing = [str(rank) for rank in range(self._plan.processes) if rank not in known]
            late = f"rank {', '.join(missing)} did not begin" if missing else "the ranks did not find each other"
            self._never_met = Failure(
                code="HT-ranks-did-not-meet",
                message=f"{late} within {self._meet_seconds:g} s",
                lines=tuple(line for line in self._output().splitlines() if line.strip())[-LOG_LINES:],
                exit_code=RESUMABLE,
                passing=True,
                hint=TIMEOUT_HINT,
            )

    def stop(self) -> None:
        """End every process that is alive; a further interrupt shortens the time that they have."""
        interrupted = len(self._interrupts.received)
        end_processes(
            self._process, self._directory, lambda: len(self._interrupts.received) > interrupted, poll=self._output
        )

    def failure(self) -> Failure | None:
        """Why the ranks are not done: by their records and the launcher's output, and by what is known beside them."""
        status = self._process.poll()
        failure = find_failure(
            self._directory,
            self._plan.processes,
            output=self._output(),
            # It may not end even after SIGKILL, perhaps waiting for a disk.
            exit_status=-signal.SIGKILL if status is None else status,
            first_dead=self._first_dead,
            fault_tolerant=self._plan.fault_tolerant,
        )
        if self._never_met and not (failure and failure.lost_hosts):
            failure = self._never_met
        if failure is None:
            return None
        failure = with_memory(failure, socket.gethostname(), self._memory, group_memory())
        # Of another signal the kernel's want of memory is no cause.
        killed = failure.code in BY_A_SIGNAL and (failure.code != "HT-rank-killed" or "(SIGKILL)" in failure.message)
        if killed and not self._interrupts.received:
            failure = self._with_memory_elsewhere(failure)
        records = read_records(self._directory).values()
        known = failure.hint or failure.stopped or failure.lost_hosts
        if not known and all(record.status != "failed" for record in records):
            # Neither a rank nor the launcher has recorded a cause, and MPI reports a shortage as an internal error.
            failure = self._with_remedies(failure, records)
        failure = with_recordings(failure, self._directory)
        if self._interrupts.received:
            return self._interrupted(failure)
        if failure.stopped and self._ended is not None and self._ended < 0 and self._ended != -signal.SIGTERM:
            # The ranks take the loss of their launcher for a request to stop.
            by = f"signal {-self._ended} ({signal_name(-self._ended)})"
            message = f"the program that started the ranks was killed by {by}; they saved their state"
            return replace(failure, code="HT-launcher-killed", message=message, stopped=False)
        return failure

    def _with_memory_elsewhere(self, failure: Failure) -> Failure:
        """The failure with what the kernels of other hosts say, where a launcher on this one knows of no cause."""
        records = [record for record in read_records(self._directory).values() if record.status == "running"]
        lost = {record.host: record for record in records if failure.host in (record.host, None)}
        lost.pop(socket.gethostname(), None)
        names = [host.host for host in self._plan.hosts for _ in range(host.slots)]
        found = killed_for_memory([names[record.rank] for record in lost.values()])
        for (host, record), kills in zip(lost.items(), found, strict=True):
            after = record.memory and replace(record.memory, kills=kills)
            failure = with_memory(failure, host, record.memory, after)
        return failure

    def _with_remedies(self, failure: Failure, records: Collection[RankRecord]) -> Failure:
        """The failure with what can be tried where the ranks ended before they found each other."""
        # A write to a full /dev/shm ends a process by SIGBUS.
        unexplained = failure.code in ("HT-rank-silent", "HT-host-no-daemon") or "(SIGBUS)" in failure.message
        if not unexplained or self._plan.processes == 1 or any(record.joined for record in records):
            return failure
        folder = shell_word(self._directory.path.parent)
        remedies = [f"`hpctrain doctor --run-dir {folder}` looks for what is short: shared memory, disks, limits"]
        if not records and in_allocation() and self._plan.start.launcher == "auto":
            remedies.append("--launcher srun-pmix lets Slurm start the ranks")
        return replace(failure, hint="\n  ".join(remedies))

    def _interrupted(self, failure: Failure) -> Failure:
        """The outcome of an interrupted run. The ranks' own account comes first: they may have hung after saving."""
        signalled = f"interrupted by {self._interrupts.received[0].name}"
        by = CANCELLED if is_cancelled(self._directory.stop) else signalled
        if failure.stopped:
            ended = "all ranks saved their state and left" if self._listen else "all ranks have left"
            return replace(failure, code="HT-run-interrupted", message=f"{by}; {ended}")
        if self._cut:
            # Asking for restarts declares the script resumable.
            exit_code = RESUMABLE if self._may_stop or self._plan.restarts else 1
            message = f"{by}; every process was ended"
            return Failure(code="HT-run-interrupted", message=message, exit_code=exit_code)
        return failure
