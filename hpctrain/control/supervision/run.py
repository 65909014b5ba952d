"""Starts a plan's ranks, follows them, and ends them in every case."""

from __future__ import annotations

import signal
import time
from dataclasses import replace

from hpctrain.common.errors import HpctrainError
from hpctrain.common.run.directory import RunDirectory
from hpctrain.common.run.events import EventWriter
from hpctrain.common.run.events.kinds import StartEvent
from hpctrain.common.run.open_directory import HeldDirectory
from hpctrain.common.run.plan import Plan
from hpctrain.common.run.records import ranks_listen, read_records
from hpctrain.common.run.stopping import CANCELLED, RESUMABLE, ask, reason_in
from hpctrain.control.launchers.command import Command
from hpctrain.control.launchers.shortages import shortages
from hpctrain.control.supervision.audience import LiveRun
from hpctrain.control.supervision.failure import Failure, find_failure, signal_name
from hpctrain.control.supervision.follow import Follower
from hpctrain.control.supervision.running_job import RunningJob


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
        follower = Follower(run.held.work, run.audience, run.directory)
        events.emit(start)
    job = RunningJob(command.start(), run, plan)
    attempt = _Attempt(job, run, plan, follower)
    try:
        attempt.follow()
    finally:
        job.stop()
    follower.advance(last=True)
    failure = attempt.failure()
    return failure and attempt.explained(failure)


class _Attempt:
    """One attempt: how its ranks are asked to stop, and what its end means."""

    def __init__(self, job: RunningJob, run: LiveRun, plan: Plan, follower: Follower) -> None:
        self._job, self._run, self._plan, self._follower = job, run, plan, follower
        self._notice = run.audience.notice
        # Whether the ranks were ended before they had stopped by themselves, may stop by themselves, and save state.
        self._cut = self._may_stop = self._listen = False
        # The launcher's exit status, where it ended by itself.
        self._ended: int | None = None

    def follow(self) -> None:
        """Follow the ranks until they have ended, or have had their time to stop."""
        job, interrupts, seconds = self._job, self._run.interrupts, self._plan.stop.seconds
        self._cut = job.wait(self._follower, lambda: bool(interrupts.received))
        if self._cut and job.lost and not interrupts.received:
            self._ask(job.lost)
            deadline = time.monotonic() + seconds
            self._cut = job.wait(self._follower, lambda: bool(interrupts.received) or time.monotonic() > deadline)
        self._ended = job.process.poll()
        if self._cut and interrupts.received:
            by = interrupts.received[0]
            self._listen = self._plan.recipe is not None or ranks_listen(job.directory)
            # A script that does not listen gets Ctrl-C as a KeyboardInterrupt, as in a program of its own.
            self._may_stop = self._listen or by in interrupts.asking or by == signal.SIGINT
            if self._may_stop and self._ask(by.name, "; the second SIGINT or SIGTERM ends them at once"):
                deadline = time.monotonic() + seconds
                self._cut = job.wait(self._follower, lambda: interrupts.second_signal or time.monotonic() > deadline)

    def _ask(self, reason: str, further: str = "") -> bool:
        """Ask the ranks to save their state and leave; returns whether they could be asked."""
        try:
            ask(self._job.directory.stop, reason)
        except HpctrainError as error:
            self._notice(
                f"warning: {reason}: the ranks cannot be asked to stop: {self._run.held.in_words(error).message}"
            )
            return False
        waiting = f"waiting up to {self._plan.stop.seconds:g} s for the ranks to end their step and save their state"
        self._notice(f"{reason}: {waiting}{further}")
        return True

    def failure(self) -> Failure | None:
        """Why the ranks are not done, by their records and the launcher's output."""
        job = self._job
        failure = find_failure(
            job.directory,
            self._plan.processes,
            output=job.output(),
            exit_status=job.exit_status,
            first_dead=job.first_dead,
            fault_tolerant=self._plan.fault_tolerant,
        )
        return job.never_met if job.never_met and not (failure and failure.lost_hosts) else failure

    def explained(self, failure: Failure) -> Failure:
        """The failure with what the launcher knows beside the ranks: signals, its own end, and what became of files."""
        job, interrupts = self._job, self._run.interrupts
        if self._is_unexplained(failure):
            failure = self._with_shortages(failure)
        if interrupts.received:
            failure = self._interrupted(failure)
        elif failure.stopped and self._ended is not None and self._ended < 0 and self._ended != -signal.SIGTERM:
            # The ranks take the loss of their launcher for a request to stop.
            by = f"signal {-self._ended} ({signal_name(-self._ended)})"
            message = f"the program that started the ranks was killed by {by}; they saved their state"
            failure = replace(failure, code="HT-launcher-killed", message=message, stopped=False)
        if not job.lost:
            return failure
        if self._run.held.now() is None or not read_records(job.directory):
            return lost_directory(self._run.held, job.lost)
        ended = "all ranks saved their state and left" if failure.stopped else failure.message
        return replace(failure, message=f"{job.lost}; {ended}")

    def _is_unexplained(self, failure: Failure) -> bool:
        """Whether neither a rank nor the launcher has recorded a cause."""
        known = failure.hint or failure.stopped or failure.lost_hosts or self._job.lost
        return not known and all(record.status != "failed" for record in read_records(self._job.directory).values())

    def _with_shortages(self, failure: Failure) -> Failure:
        """The failure with what this host lacks, which comes first where no rank had met the others.

        MPI itself reports a shortage as an internal error, or not at all.
        """
        lacking = list(shortages(run=self._job.directory.path))
        if not lacking:
            return failure
        faults = "; ".join(shortage.fault for shortage in lacking)
        remedies = "\n  ".join(shortage.remedy for shortage in lacking)
        if self._plan.processes == 1 or any(record.joined for record in read_records(self._job.directory).values()):
            return replace(failure, hint=f"{faults}\n  {remedies}")
        return replace(failure, code="HT-host-shortage", message=f"{faults}; {failure.message}", hint=remedies)

    def _interrupted(self, failure: Failure) -> Failure:
        """The outcome of an interrupted run. The ranks' own account comes first: they may have hung after saving."""
        by = f"interrupted by {self._run.interrupts.received[0].name}"
        by = CANCELLED if _cancelled(self._job.directory) else by
        if failure.stopped:
            ended = "all ranks saved their state and left" if self._listen else "all ranks have left"
            return replace(failure, code="HT-run-interrupted", message=f"{by}; {ended}")
        if self._cut:
            # Asking for restarts declares the script resumable.
            exit_code = RESUMABLE if self._may_stop or self._plan.restarts else 1
            message = f"{by}; every process was ended"
            return Failure(code="HT-run-interrupted", message=message, exit_code=exit_code)
        return failure


def lost_directory(held: HeldDirectory, fate: str) -> Failure:
    """The failure of a run whose directory was deleted, or was moved before any rank began."""
    if held.now() is None:
        hint = "start it anew: nothing of it can be saved any more"
        return Failure(code="HT-run-directory-deleted", message=fate, hint=hint, exit_code=1)
    return Failure(code="HT-run-directory-moved", message=fate, exit_code=RESUMABLE)


def _cancelled(directory: RunDirectory) -> bool:
    try:
        return reason_in(directory.stop) == CANCELLED
    except OSError:
        return False
