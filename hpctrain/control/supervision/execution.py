"""Executes a run with all its attempts to the final record."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

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
    run_events,
)
from hpctrain.control.resuming.resume import plan_without
from hpctrain.control.supervision.audience import LiveRun, ReadyRun, Summary
from hpctrain.control.supervision.failure import Failure
from hpctrain.control.supervision.host_questions import silent_hosts
from hpctrain.control.supervision.interrupts import Interrupted
from hpctrain.control.supervision.start import available_launcher, run_attempt

_LONGEST_SECONDS = 60.0

Summarise = Callable[[RunDirectory, Plan, str], Summary]


class Execution:
    """Runs the plan that a directory already holds, also again after a failure, and leaves ``summary.json``.

    Args:
        run: the first attempt, with all hosts; later ones can have fewer.
        summarise: makes the content of ``summary.json`` from the events and the run's status.
    """

    def __init__(self, run: ReadyRun, live: LiveRun, summarise: Summarise) -> None:
        self._run, self._live, self._summarise = run, live, summarise
        self._directory, self._interrupts, self._notice = live.directory, live.interrupts, live.audience.notice
        self._begun = run.plan
        # Whether this attempt has done a step, and whether any has.
        self._stepped, self._worked = False, bool(run.attempt.iteration)

    def run(self) -> tuple[Failure | None, Summary]:
        """Execute the run to its end.

        Returns:
            Why the run is not done, None if it is; and the summary.

        Raises:
            HpctrainError: the ranks cannot be started, which is recorded as the end of the attempt.
        """
        while True:
            failure = self._attempt()
            if failure is None or self._interrupts.received:
                break
            further = self._after_failure(failure)
            if isinstance(further, Failure):
                failure = further
                break
            with EventWriter(self._directory.events) as events:
                events.emit(FaultEvent(**failure.cause))
            self._run = further
            self._directory.begin_attempt(further.plan)
        if failure:
            self._live.audience.failed(failure)
        return failure, self._record_end(failure)

    def _attempt(self) -> Failure | None:
        """Run one attempt; see :meth:`run` for what is raised."""
        attempt = self._run.attempt
        try:
            self._record_damaged(attempt)
            audience = replace(self._live.audience, show=self.show)
            failure = run_attempt(self._run, replace(self._live, audience=audience))
        except Exception as error:
            fault = HpctrainError(
                "HT-launcher-internal-error",
                "hpctrain failed: {type}: {reason}",
                exit_code=1,
                type=type(error).__name__,
                reason=error,
            )
            self._record_error(error if isinstance(error, HpctrainError) else fault)
            raise
        if failure and failure.exit_code == RESUMABLE and self._is_done():
            # A host or a rank was lost after all work was done, but before each rank had recorded it.
            return None
        if failure and attempt.number > 1 and not self._interrupts.received and not read_records(self._directory):
            # Ranks could be started in an earlier attempt, so a host may be gone.
            return replace(failure, exit_code=RESUMABLE)
        return failure

    def show(self, event: Event) -> None:
        """Take note of an attempt's progress, and pass it on."""
        if isinstance(event, StartEvent):
            self._stepped = False
        elif isinstance(event, StepEvent):
            self._stepped = self._worked = True
        self._live.audience.show(event)

    def _after_failure(self, failure: Failure) -> ReadyRun | Failure:
        """Wait for the restart after a failed attempt, or return the failure that ends the run."""
        try:
            with self._interrupts.raised():
                further = self.next_run(failure)
        except Interrupted:
            further = None
        if isinstance(further, Failure) or (further and self._interrupts.wait(wait_seconds(further.attempt.restart))):
            return further
        message = f"{failure.message}; interrupted by {self._interrupts.received[0].name} before it was started again"
        again = self._begun.restarts and not failure.refused
        return replace(failure, message=message, exit_code=RESUMABLE if again else failure.exit_code)

    def next_run(self, failure: Failure) -> ReadyRun | Failure:
        """The run that follows an attempt which ended without an interrupt, or the failure that ends it."""
        try:
            events = run_events(self._directory)
            further = attempt_from_here(self._directory, events)
        except HpctrainError as error:
            message = f"{failure.message}; the run cannot be resumed: {error.message}"
            return replace(failure, message=message, hint=error.hint, exit_code=1)
        if further is None:
            return failure
        script, past = self._begun.script is not None, attempts(events)
        # The events of a run can be lost while it goes on.
        progress = bool(past) and made_progress(past[-1], further, script=script, until=time.time())
        number = next_restart(
            failure,
            # A script is restarted because the user asked for it.
            stepped=self._stepped or script,
            worked=self._worked or script,
            idle=0 if progress else self._run.attempt.restart,
            limit=self._begun.restarts,
            hosts=len(self._begun.hosts),
        )
        if number is None:
            return failure
        try:
            return self._restart(failure, replace(further, restart=number))
        except HpctrainError as error:
            self._notice(f"the run cannot continue by itself: {error.message}")
            return failure

    def _restart(self, failure: Failure, attempt: Attempt) -> ReadyRun:
        machine, lost = self._run.machine, failure.lost_hosts
        silent = silent_hosts(self._begun, self._run.launcher, machine, lost=lost)
        # A lost host that answers is used in one further attempt.
        plan, warnings = plan_without(self._begun, (*silent, *(lost if attempt.restart > 1 else ())), machine)
        launcher = available_launcher(plan, machine)
        self._announce(failure, plan, attempt, silent)
        for warning in warnings:
            self._notice(f"warning: {warning}")
        return replace(self._run, plan=plan, launcher=launcher, attempt=attempt)

    def _announce(self, failure: Failure, plan: Plan, attempt: Attempt, silent: Sequence[str]) -> None:
        hosts = fold_hosts([host.host for host in plan.hosts])
        others = [host for host in silent if not any(same_host(host, lost) for lost in failure.lost_hosts)]
        resumed = f"resuming from step {attempt.iteration}" if plan.recipe else "starting it again"
        unanswered = f"; no answer from {fold_hosts(others)}" if others else ""
        self._notice(
            f"{failure.message}{unanswered}; {resumed} with {plan.ranks} of "
            f"{max(self._begun.ranks, plan.ranks)} ranks on {hosts} "
            f"in {wait_seconds(attempt.restart):g} s (restart {attempt.restart} of {self._begun.restarts})"
        )

    def _is_done(self) -> bool:
        try:
            return is_done(run_events(self._directory))
        except HpctrainError:
            # Without its events nothing shows that the run is done.
            return False

    def _record_damaged(self, attempt: Attempt) -> None:
        """Record checkpoints that are damaged since the last attempt."""
        with EventWriter(self._directory.events) as events:
            for path, fault in attempt.damaged:
                kept_as = set_aside(path)
                events.emit(DamagedEvent(path=path.name, fault=fault, kept_as=kept_as.name))
                self._notice(f"warning: {path} is damaged and was skipped: {fault}; it is now {kept_as}")

    def _record_error(self, error: HpctrainError) -> None:
        """Record an attempt that hpctrain itself could not carry out, where the disk allows it."""
        attempt, plan = self._run.attempt, self._run.plan
        with contextlib.suppress(HpctrainError):
            starts = [event for event in run_events(self._directory) if isinstance(event, StartEvent)]
            if all(start.attempt != attempt.number for start in starts):
                with EventWriter(self._directory.events) as events:
                    events.emit(attempt.start(plan, "none"))
            self._record_end(Failure(code=error.code, message=error.message, exit_code=error.exit_code))

    def _record_end(self, failure: Failure | None) -> Summary:
        """Record how the run ended; returns its summary."""
        plan, status = self._run.plan, failure.status if failure else "done"
        with EventWriter(self._directory.events) as events:
            if failure and not failure.stopped:
                events.emit(FaultEvent(**failure.cause))
            # For a recipe that is done, rank 0 has recorded this event.
            if failure or plan.script:
                events.emit(EndEvent(status=status))
        try:
            summary = self._summarise(self._directory, plan, status)
        except HpctrainError as error:
            self._notice(f"warning: {error.message}; summary.json has the run's status alone")
            summary = {"status": status, "ranks": plan.ranks, "metrics": {}}
        if failure:
            summary["failure"] = failure.cause
        write_json(self._directory.summary, summary)
        return summary


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
