"""Executes a run with all its attempts, from the choice of the launcher to the final record."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from hpctrain.common.checkpoints.find import set_aside
from hpctrain.common.cluster.host_list import fold_hosts
from hpctrain.common.cluster.machine import same_host
from hpctrain.common.errors import HpctrainError
from hpctrain.common.run.directory import RunDirectory, write_json
from hpctrain.common.run.events import Event, EventWriter
from hpctrain.common.run.events.kinds import DamagedEvent, EndEvent, FaultEvent, StallEvent, StartEvent, StepEvent
from hpctrain.common.run.plan import Plan
from hpctrain.common.run.records import read_records
from hpctrain.common.run.stopping import RESUMABLE
from hpctrain.control.launchers.launcher_choice import choose_launcher, needs_proof
from hpctrain.control.resuming.attempts import (
    WORK_SECONDS,
    Attempt,
    attempt_from_here,
    is_done,
    replace_plan,
    run_events,
    script_sha256,
)
from hpctrain.control.resuming.resume import plan_without
from hpctrain.control.supervision.audience import LiveRun, ReadyRun, Summary
from hpctrain.control.supervision.failure import Failure
from hpctrain.control.supervision.host_questions import silent_hosts
from hpctrain.control.supervision.interrupts import Interrupted
from hpctrain.control.supervision.run import lost_directory
from hpctrain.control.supervision.start import available_launcher, run_attempt

Summarise = Callable[[RunDirectory, Plan, str], Summary]


@dataclass(frozen=True, kw_only=True)
class Execution(LiveRun):
    """Runs the plan that a directory already holds, and leaves ``summary.json``.

    An attempt that fails is followed by another, as :class:`Supervisor` decides.

    Attributes:
        summarise: makes the content of ``summary.json`` from the events and the run's status.
    """

    summarise: Summarise

    def run(self, run: ReadyRun) -> tuple[Failure | None, Summary]:
        """Execute the run to its end.

        Returns:
            Why the run is not done, None if it is; and the summary.

        Raises:
            HpctrainError: the ranks cannot be started, which is recorded as the end of the attempt; with the exit code
                of a resumable run where no launcher works, because a host may just have died.
        """
        supervisor = Supervisor(run, self.directory, self.audience.notice)
        while True:
            script = script_sha256(run.plan)
            failure = self._attempt(run, supervisor)
            # After a directory was moved or deleted, the user has to say what comes next.
            if failure is None or self.interrupts.received or self.held.fate():
                break
            further = self._after_failure(supervisor, run, failure)
            if isinstance(further, Failure):
                failure = further
                break
            with EventWriter(self.directory.events) as events:
                events.emit(FaultEvent(**failure.cause))
            run = further.run
            replace_plan(self.directory, run.plan)
            if script_sha256(run.plan) != script:
                self.audience.notice(f"warning: {run.plan.title} is not what it was in the last attempt")
        if failure:
            self.audience.failed(failure, self.held.now() or self.directory)
        return failure, self._record_end(run.plan, failure)

    def _after_failure(self, supervisor: Supervisor, run: ReadyRun, failure: Failure) -> Restart | Failure:
        """Wait for the restart after a failed attempt, or return the failure that ends the run."""
        try:
            with self.interrupts.raised():
                further = supervisor.next_step(failure, run)
        except Interrupted:
            further = None
        if isinstance(further, Failure) or (further and self.interrupts.wait(further.seconds)):
            return further
        message = f"{failure.message}; interrupted by {self.interrupts.received[0].name} before it was started again"
        again = run.plan.restarts and not failure.refused
        return replace(failure, message=message, exit_code=RESUMABLE if again else failure.exit_code)

    def _attempt(self, run: ReadyRun, supervisor: Supervisor) -> Failure | None:
        """Run one attempt; see :meth:`run` for what is raised."""

        def show(event: Event) -> None:
            supervisor.record(event)
            try:
                self.audience.show(event)
            except HpctrainError:
                # Progress that is kept in files fails where the directory was moved, which is reported elsewhere.
                if not self.held.fate():
                    raise

        try:
            with self.interrupts.raised():
                run = self._with_launcher(run)
        except HpctrainError as error:
            self._record_error(run, error, RESUMABLE)
            raise error.but(exit_code=RESUMABLE) from error
        if fate := self.held.fate():
            return lost_directory(self.held, fate)
        try:
            self._record_begin(run.attempt)
            failure = run_attempt(run, replace(self, audience=replace(self.audience, show=show)))
        except Exception as error:
            if isinstance(error, HpctrainError) and (fate := self.held.fate()):
                return lost_directory(self.held, fate)
            fault = HpctrainError(
                "HT-launcher-internal-error",
                "hpctrain failed: {type}: {reason}",
                exit_code=1,
                type=type(error).__name__,
                reason=error,
            )
            known = error if isinstance(error, HpctrainError) else fault
            self._record_error(run, known, known.exit_code)
            raise
        if failure and failure.exit_code == RESUMABLE and self._is_done():
            # A host or a rank was lost after all work was done, but before each rank had recorded it.
            return None
        if failure and run.attempt.number > 1 and not self.interrupts.received and not read_records(self.directory):
            # Ranks could be started in an earlier attempt, so a host may be gone.
            return replace(failure, exit_code=RESUMABLE)
        return failure

    def _with_launcher(self, run: ReadyRun) -> ReadyRun:
        """The run with the first launcher that works here, where only a trial start tells."""
        if run.launcher is None or not needs_proof(run.plan):
            return run
        return replace(run, launcher=choose_launcher(run.plan, run.machine, self.directory.path))

    def _is_done(self) -> bool:
        try:
            return is_done(run_events(self.directory))
        except HpctrainError:
            # Without its events nothing shows that the run is done.
            return False

    def _record_begin(self, attempt: Attempt) -> None:
        """Record checkpoints that are damaged since the last attempt."""
        with EventWriter(self.directory.events) as events:
            for path, fault in attempt.damaged:
                kept_as = set_aside(path)
                events.emit(DamagedEvent(path=path.name, fault=fault, kept_as=kept_as.name))
                self.audience.notice(f"warning: {path} is damaged and was skipped: {fault}; it is now {kept_as}")

    def _record_error(self, run: ReadyRun, error: HpctrainError, exit_code: int) -> None:
        """Record an attempt that hpctrain itself could not carry out, where the disk allows it."""
        with contextlib.suppress(HpctrainError):
            starts = [event for event in run_events(self.directory) if isinstance(event, StartEvent)]
            if all(start.attempt != run.attempt.number for start in starts):
                with EventWriter(self.directory.events) as events:
                    events.emit(run.attempt.start(run.plan, "none"))
            self._record_end(run.plan, Failure(code=error.code, message=error.message, exit_code=exit_code))

    def _record_end(self, plan: Plan, failure: Failure | None) -> Summary:
        """Record how the run ended; returns its summary."""
        directory = self.held.now()
        if directory is None:
            # A deleted directory is not made again; the user has been told why the run failed.
            return {"status": failure.status if failure else "done", "ranks": plan.ranks, "metrics": {}}
        with EventWriter(directory.events) as events:
            if failure and not failure.stopped:
                events.emit(FaultEvent(**failure.cause))
            # For a recipe that is done, rank 0 has recorded this event.
            if failure or plan.script:
                events.emit(EndEvent(status=failure.status if failure else "done"))
        summary = self._summary(directory, plan, failure.status if failure else "done")
        if failure:
            summary["failure"] = failure.cause
        write_json(directory.summary, summary)
        return summary

    def _summary(self, directory: RunDirectory, plan: Plan, status: str) -> Summary:
        try:
            return self.summarise(directory, plan, status)
        except HpctrainError as error:
            self.audience.notice(f"warning: {error.message}; summary.json has the run's status alone")
            return {"status": status, "ranks": plan.ranks, "metrics": {}}


@dataclass(frozen=True, kw_only=True)
class Restart:
    """The next attempt, and the wait before it."""

    run: ReadyRun
    seconds: float


class Supervisor:
    """Decides what follows each attempt of a run that is not done.

    Args:
        run: as the first attempt has it; later ones can have fewer of its hosts.
        notice: gets what the user has to know now.
    """

    def __init__(self, run: ReadyRun, directory: RunDirectory, notice: Callable[[str], None]) -> None:
        self._plan, self._machine, self._directory, self._notice = run.plan, run.machine, directory, notice
        # How far a script's saved state reaches is not known, so its progress is the number of long attempts.
        self._step = run.attempt.iteration or int(run.plan.script is not None)
        self._before = Reach(checkpoint=run.attempt.iteration, step=self._step)
        # When this attempt did its last known step, and since when its ranks have waited for one that hangs.
        self._last_step: float | None = None
        self._stalled: float | None = None
        self._begin = time.monotonic()

    def record(self, event: Event) -> None:
        """Record the progress of an attempt."""
        if isinstance(event, StartEvent):
            self._last_step = self._stalled = None
            self._begin = time.monotonic()
        elif isinstance(event, StepEvent):
            self._last_step = time.monotonic()
            if self._plan.recipe:
                self._step = max(self._step, event.iteration)
        elif isinstance(event, StallEvent):
            self._stalled = time.monotonic() - event.seconds

    def next_step(self, failure: Failure, run: ReadyRun) -> Restart | Failure:
        """The restart after an attempt that ended without an interrupt, or the failure that ends the run."""
        try:
            further = attempt_from_here(self._directory, run_events(self._directory))
        except HpctrainError as error:
            message = f"{failure.message}; the run cannot be resumed: {error.message}"
            return replace(failure, message=message, hint=error.hint, exit_code=1)
        try:
            return (self._restart(failure, run, further) if further else None) or failure
        except HpctrainError as error:
            self._notice(f"the run cannot continue by itself: {error.message}")
            return failure

    def _worked_for_long(self) -> bool:
        """Whether an attempt of a script counts as progress. Time spent hanging does not count."""
        return (self._last_step or self._stalled or time.monotonic()) - self._begin > WORK_SECONDS

    def _restart(self, failure: Failure, run: ReadyRun, further: Attempt) -> Restart | None:
        if self._plan.script and self._worked_for_long():
            self._step += 1
        before, self._before = self._before, Reach(checkpoint=further.iteration, step=self._step)
        number = next_restart(
            failure,
            before,
            self._before,
            # A script is restarted because the user asked for it.
            stepped=self._last_step is not None or self._plan.script is not None,
            idle=run.attempt.restart,
            limit=self._plan.restarts,
            hosts=len(self._plan.hosts),
        )
        if number is None:
            return None
        silent = silent_hosts(self._plan, run.launcher, self._machine, lost=failure.lost_hosts)
        # A lost host that answers is used in one further attempt.
        gone = (*silent, *(failure.lost_hosts if number > 1 else ()))
        plan, warnings = plan_without(self._plan, gone, self._machine)
        launcher = available_launcher(plan, self._machine)
        restart = Restart(
            run=replace(run, plan=plan, launcher=launcher, attempt=replace(further, restart=number)),
            seconds=wait_seconds(number),
        )
        self._announce(failure, restart, silent)
        for warning in warnings:
            self._notice(f"warning: {warning}")
        return restart

    def _announce(self, failure: Failure, restart: Restart, silent: tuple[str, ...]) -> None:
        plan, attempt = restart.run.plan, restart.run.attempt
        hosts = fold_hosts([host.host for host in plan.hosts])
        others = [host for host in silent if not any(same_host(host, lost) for lost in failure.lost_hosts)]
        resumed = f"resuming from step {attempt.iteration}" if self._plan.recipe else "starting it again"
        unanswered = f"; no answer from {fold_hosts(others)}" if others else ""
        self._notice(
            f"{failure.message}{unanswered}; {resumed} with {plan.ranks} of "
            f"{max(self._plan.ranks, plan.ranks)} ranks on {hosts} "
            f"in {restart.seconds:g} s (restart {attempt.restart} of {self._plan.restarts})"
        )


_LONGEST_SECONDS = 60.0


@dataclass(frozen=True, kw_only=True)
class Reach:
    """The progress of a run.

    Attributes:
        checkpoint: iteration of its newest whole checkpoint, 0 where it has none.
        step: the furthest step of any attempt.
    """

    checkpoint: int = 0
    step: int = 0

    def is_beyond(self, other: Reach) -> bool:
        """Whether the run got further. Steps count only until the first checkpoint: after that they are repeated."""
        return self.checkpoint > other.checkpoint or (self.checkpoint == 0 and self.step > other.step)


def next_restart(
    failure: Failure, before: Reach, after: Reach, *, stepped: bool, idle: int, limit: int, hosts: int = 1
) -> int | None:
    """The number of the next restart among those without progress: 1, 2, …; None if the run ends.

    Args:
        failure: what ended an attempt that no signal interrupted.
        before, after: how far the run was when the attempt began, and is now.
        idle: the number that the attempt itself had, 0 for one that a user or a job began.
        limit: the most restarts without progress.
        hosts: the number of hosts that it ran on.
    """
    if failure.stopped or failure.refused or failure.exit_code == 2:
        return None
    # An attempt that fails before its first step would fail again, unless a host was lost, the cause is temporary, or a
    # rank was killed in a run that has worked before or that has several hosts.
    killed = failure.exit_code == RESUMABLE and (after.step or after.checkpoint or hosts > 1)
    if not (stepped or killed or failure.lost_hosts or failure.passing):
        return None
    number = 1 if after.is_beyond(before) else idle + 1
    return number if number <= limit else None


def wait_seconds(number: int) -> float:
    """The time before a restart, which doubles each time: the cause may pass, and hosts are not asked too often."""
    return float(min(2 ** (number - 1), _LONGEST_SECONDS))
