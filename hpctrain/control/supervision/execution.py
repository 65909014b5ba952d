"""Executes a run with all its attempts, from the choice of the launcher to the final record."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from hpctrain.common.checkpoints.find import set_aside
from hpctrain.common.cluster.host_list import fold_hosts
from hpctrain.common.cluster.machine import same_host
from hpctrain.common.errors import HpctrainError
from hpctrain.common.run.directory import RunDirectory, write_json
from hpctrain.common.run.events import Event, EventWriter, attempts
from hpctrain.common.run.events.kinds import DamagedEvent, EndEvent, FaultEvent, StartEvent, StepEvent
from hpctrain.common.run.plan import Plan
from hpctrain.common.run.records import read_records
from hpctrain.common.run.stopping import RESUMABLE
from hpctrain.control.resuming.attempts import (
    Attempt,
    attempt_from_here,
    is_done,
    made_progress,
    replace_plan,
    run_events,
    script_sha256,
)
from hpctrain.control.resuming.resume import plan_without
from hpctrain.control.supervision.audience import LiveRun, ReadyRun, Summary
from hpctrain.control.supervision.failure import Failure
from hpctrain.control.supervision.host_questions import silent_hosts
from hpctrain.control.supervision.interrupts import Interrupted
from hpctrain.control.supervision.start import available_launcher, run_attempt

_LONGEST_SECONDS = 60.0

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
            HpctrainError: the ranks cannot be started, which is recorded as the end of the attempt.
        """
        supervisor = Supervisor(run, self.directory, self.audience.notice)
        while True:
            script = script_sha256(run.plan)
            failure = self._attempt(run, supervisor)
            if failure is None or self.interrupts.received:
                break
            further = self._after_failure(supervisor, run, failure)
            if isinstance(further, Failure):
                failure = further
                break
            with EventWriter(self.directory.events) as events:
                events.emit(FaultEvent(**failure.cause))
            run = further
            replace_plan(self.directory, run.plan, run.attempt.number)
            if script_sha256(run.plan) != script:
                self.audience.notice(f"warning: {run.plan.title} is not what it was in the last attempt")
        if failure:
            self.audience.failed(failure)
        return failure, self._record_end(run.plan, failure)

    def _after_failure(self, supervisor: Supervisor, run: ReadyRun, failure: Failure) -> ReadyRun | Failure:
        """Wait for the restart after a failed attempt, or return the failure that ends the run."""
        try:
            with self.interrupts.raised():
                further = supervisor.next_step(failure, run)
        except Interrupted:
            further = None
        if isinstance(further, Failure) or (further and self.interrupts.wait(wait_seconds(further.attempt.restart))):
            return further
        message = f"{failure.message}; interrupted by {self.interrupts.received[0].name} before it was started again"
        again = run.plan.restarts and not failure.refused
        return replace(failure, message=message, exit_code=RESUMABLE if again else failure.exit_code)

    def _attempt(self, run: ReadyRun, supervisor: Supervisor) -> Failure | None:
        """Run one attempt; see :meth:`run` for what is raised."""

        def show(event: Event) -> None:
            supervisor.record(event)
            self.audience.show(event)

        try:
            self._record_begin(run.attempt)
            failure = run_attempt(run, replace(self, audience=replace(self.audience, show=show)))
        except Exception as error:
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
        directory = self.directory
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


class Supervisor:
    """Decides what follows each attempt of a run that is not done.

    Args:
        run: as the first attempt has it; later ones can have fewer of its hosts.
        notice: gets what the user has to know now.
    """

    def __init__(self, run: ReadyRun, directory: RunDirectory, notice: Callable[[str], None]) -> None:
        self._plan, self._machine, self._directory, self._notice = run.plan, run.machine, directory, notice
        # When this attempt did its last step, and whether any attempt has done one.
        self._stepped: float | None = None
        self._worked = bool(run.attempt.iteration)

    def record(self, event: Event) -> None:
        """Record the progress of an attempt."""
        if isinstance(event, StartEvent):
            self._stepped = None
        elif isinstance(event, StepEvent):
            self._stepped, self._worked = event.time, True

    def next_step(self, failure: Failure, run: ReadyRun) -> ReadyRun | Failure:
        """The run that follows an attempt which ended without an interrupt, or the failure that ends it."""
        try:
            events = run_events(self._directory)
            further = attempt_from_here(self._directory, events)
        except HpctrainError as error:
            message = f"{failure.message}; the run cannot be resumed: {error.message}"
            return replace(failure, message=message, hint=error.hint, exit_code=1)
        if further is None:
            return failure
        script, past = self._plan.script is not None, attempts(events)
        # The events of a run can be lost while it goes on.
        progress = bool(past) and made_progress(
            past[-1], further, script=script, until=time.time(), stepped=self._stepped
        )
        number = next_restart(
            failure,
            # A script is restarted because the user asked for it.
            stepped=self._stepped is not None or script,
            worked=self._worked or script,
            idle=0 if progress else run.attempt.restart,
            limit=self._plan.restarts,
            hosts=len(self._plan.hosts),
        )
        if number is None:
            return failure
        try:
            return self._restart(failure, run, replace(further, restart=number))
        except HpctrainError as error:
            self._notice(f"the run cannot continue by itself: {error.message}")
            return failure

    def _restart(self, failure: Failure, run: ReadyRun, attempt: Attempt) -> ReadyRun:
        silent = silent_hosts(self._plan, run.launcher, self._machine, lost=failure.lost_hosts)
        # A lost host that answers is used in one further attempt.
        gone = (*silent, *(failure.lost_hosts if attempt.restart > 1 else ()))
        plan, warnings = plan_without(self._plan, gone, self._machine)
        launcher = available_launcher(plan, self._machine)
        self._announce(failure, plan, attempt, silent)
        for warning in warnings:
            self._notice(f"warning: {warning}")
        return replace(run, plan=plan, launcher=launcher, attempt=attempt)

    def _announce(self, failure: Failure, plan: Plan, attempt: Attempt, silent: Sequence[str]) -> None:
        hosts = fold_hosts([host.host for host in plan.hosts])
        others = [host for host in silent if not any(same_host(host, lost) for lost in failure.lost_hosts)]
        resumed = f"resuming from step {attempt.iteration}" if self._plan.recipe else "starting it again"
        unanswered = f"; no answer from {fold_hosts(others)}" if others else ""
        self._notice(
            f"{failure.message}{unanswered}; {resumed} with {plan.ranks} of "
            f"{max(self._plan.ranks, plan.ranks)} ranks on {hosts} "
            f"in {wait_seconds(attempt.restart):g} s (restart {attempt.restart} of {self._plan.restarts})"
        )


def next_restart(failure: Failure, *, stepped: bool, worked: bool, idle: int, limit: int, hosts: int = 1) -> int | None:
    """The number of the next restart among those without progress: 1, 2, …; None if the run ends.

    Args:
        failure: what ended an attempt that no signal interrupted.
        stepped, worked: whether this attempt has done a step, and whether any has.
        idle: the number of restarts without progress so far.
        limit: the most of them.
        hosts: the number of hosts that it ran on.
    """
    if failure.stopped or failure.refused or failure.exit_code == 2:
        return None
    # An attempt that fails before its first step would fail again, unless a host was lost, the cause is temporary, or a
    # rank was killed in a run that has worked before or that has several hosts.
    killed = failure.exit_code == RESUMABLE and (worked or hosts > 1)
    if not (stepped or killed or failure.lost_hosts or failure.passing):
        return None
    return idle + 1 if idle < limit else None


def wait_seconds(number: int) -> float:
    """The time before a restart, which doubles each time: the cause may pass, and hosts are not asked too often."""
    return float(min(2 ** (number - 1), _LONGEST_SECONDS))
