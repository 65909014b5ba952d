"""Executes a run with all its attempts, from the choice of the launcher to the final record."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, replace

from hpctrain.common.checkpoints.find import set_aside
from hpctrain.common.checkpoints.reconcile import GONE, missing_text
from hpctrain.common.cluster.machine import Machine
from hpctrain.common.errors import HpctrainError
from hpctrain.common.run.directory import RunDirectory, write_json
from hpctrain.common.run.events import Event, EventWriter
from hpctrain.common.run.events.kinds import DamagedEvent, EndEvent, FaultEvent, StartEvent
from hpctrain.common.run.plan import Plan
from hpctrain.common.run.records import read_records
from hpctrain.common.run.stopping import RESUMABLE
from hpctrain.control.launchers.command import Launcher
from hpctrain.control.launchers.launcher_choice import choose_launcher, needs_proof
from hpctrain.control.resuming.attempts import Attempt, is_done, replace_plan, run_events, script_sha256
from hpctrain.control.supervision.audience import ReadyRun, Summary
from hpctrain.control.supervision.failure import Failure
from hpctrain.control.supervision.interrupts import Interrupted
from hpctrain.control.supervision.run import LiveRun, lost_directory
from hpctrain.control.supervision.start import run_attempt
from hpctrain.control.supervision.supervisor import Restart, Supervisor

Summarise = Callable[[RunDirectory, Plan, str], Summary]


@dataclass(frozen=True, kw_only=True)
class Execution(LiveRun):
    """Runs the plan that a directory already holds, and leaves ``summary.json``.

    An attempt that fails is followed by another, as :class:`hpctrain.control.supervision.supervisor.Supervisor`
    decides.

    Attributes:
        summarise: makes the content of ``summary.json`` from the events and the run's status.
    """

    machine: Machine
    summarise: Summarise

    def run(self, plan: Plan, attempt: Attempt, found: Launcher | None) -> tuple[Failure | None, Summary]:
        """Execute the run to its end.

        Returns:
            Why the run is not done, None if it is; and the summary.

        Raises:
            HpctrainError: the ranks cannot be started, which is recorded as the end of the attempt; with the exit code
                of a resumable run where no launcher works, because a host may just have died.
        """
        supervisor = Supervisor(plan, attempt, self.directory, self.machine, self.audience.notice)
        while True:
            script = script_sha256(plan)
            failure = self._attempt(plan, attempt, found, supervisor)
            # After a directory was moved or deleted, the user has to say what comes next.
            if failure is None or self.interrupts.received or self.held.fate():
                break
            further = self._after_failure(supervisor, plan, failure, attempt, found)
            if isinstance(further, Failure):
                failure = further
                break
            with EventWriter(self.directory.events) as events:
                events.emit(FaultEvent(**failure.cause))
            replace_plan(self.directory, further.plan)
            plan, attempt, found = further.plan, further.attempt, further.launcher
            if script_sha256(plan) != script:
                self.audience.notice(f"warning: {plan.title} is not what it was in the last attempt")
        if failure:
            self.audience.failed(failure, self.held.now() or self.directory)
        return failure, self._record_end(plan, failure)

    def _after_failure(
        self, supervisor: Supervisor, plan: Plan, failure: Failure, attempt: Attempt, found: Launcher | None
    ) -> Restart | Failure:
        """Wait for the restart after a failed attempt, or return the failure that ends the run."""
        try:
            with self.interrupts.raised():
                further = supervisor.next_step(failure, attempt, found)
        except Interrupted:
            further = None
        if isinstance(further, Failure) or (further and self.interrupts.wait(further.seconds)):
            return further
        message = f"{failure.message}; interrupted by {self.interrupts.received[0].name} before it was started again"
        again = plan.restarts and not failure.refused
        return replace(failure, message=message, exit_code=RESUMABLE if again else failure.exit_code)

    def _attempt(self, plan: Plan, attempt: Attempt, found: Launcher | None, supervisor: Supervisor) -> Failure | None:
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
                launcher = (
                    choose_launcher(plan, self.machine, self.directory.path) if found and needs_proof(plan) else found
                )
        except HpctrainError as error:
            self._record_error(plan, attempt, error, RESUMABLE)
            raise error.but(exit_code=RESUMABLE) from error
        if fate := self.held.fate():
            return lost_directory(self.held, fate)
        try:
            self._record_begin(attempt)
            ready = ReadyRun(plan=plan, machine=self.machine, launcher=launcher, attempt=attempt)
            failure = run_attempt(ready, replace(self, audience=replace(self.audience, show=show)))
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
            self._record_error(plan, attempt, known, known.exit_code)
            raise
        if failure and failure.exit_code == RESUMABLE and self._is_done():
            # A host or a rank was lost after all work was done, but before each rank had recorded it.
            return None
        if failure and attempt.number > 1 and not self.interrupts.received and not read_records(self.directory):
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
        """Record checkpoints that are damaged or missing since the last attempt."""
        with EventWriter(self.directory.events) as events:
            for path, fault in attempt.damaged:
                kept_as = set_aside(path)
                events.emit(DamagedEvent(path=path.name, fault=fault, kept_as=kept_as.name))
                self.audience.notice(f"warning: {path} is damaged and was skipped: {fault}; it is now {kept_as}")
            for path in attempt.missing:
                events.emit(DamagedEvent(path=path.name, fault=GONE, kept_as=None))
                self.audience.notice(f"warning: {missing_text(path, attempt.iteration)}")

    def _record_error(self, plan: Plan, attempt: Attempt, error: HpctrainError, exit_code: int) -> None:
        """Record an attempt that hpctrain itself could not carry out, where the disk allows it."""
        with contextlib.suppress(HpctrainError):
            starts = [event for event in run_events(self.directory) if isinstance(event, StartEvent)]
            if all(start.attempt != attempt.number for start in starts):
                with EventWriter(self.directory.events) as events:
                    events.emit(attempt.start(plan, "none"))
            self._record_end(plan, Failure(code=error.code, message=error.message, exit_code=exit_code))

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
