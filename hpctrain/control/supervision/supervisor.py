"""Restarts a run from its newest checkpoint after a failure, on the hosts that there are then."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from hpctrain.common.cluster.host_list import fold_hosts
from hpctrain.common.cluster.machine import same_host
from hpctrain.common.errors import HpctrainError
from hpctrain.common.run.directory import RunDirectory
from hpctrain.common.run.events import Event
from hpctrain.common.run.events.kinds import StallEvent, StartEvent, StepEvent
from hpctrain.common.run.stopping import RESUMABLE
from hpctrain.control.resuming.attempts import WORK_SECONDS, Attempt, attempt_from_here, run_events
from hpctrain.control.resuming.resume import plan_without
from hpctrain.control.supervision.audience import ReadyRun
from hpctrain.control.supervision.failure import Failure
from hpctrain.control.supervision.host_questions import silent_hosts
from hpctrain.control.supervision.start import available_launcher


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
