"""Restarts a run that failed, from its newest checkpoint, on the hosts that still answer."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from hpctrain.cluster.host_list import fold_hosts
from hpctrain.errors import HpctrainError
from hpctrain.launch.attempts import WORK_SECONDS, Attempt, attempt_from_here, run_events
from hpctrain.launch.changes import changes_since, take_back_command
from hpctrain.launch.command import Launcher
from hpctrain.launch.resume import plan_without
from hpctrain.planning.machine import Machine, same_host
from hpctrain.run.directory import RunDirectory
from hpctrain.run.events import Event
from hpctrain.run.events.kinds import StartEvent, StepEvent
from hpctrain.run.plan import Plan
from hpctrain.supervision.answering import silent_hosts
from hpctrain.supervision.failure import Failure
from hpctrain.supervision.restarts import Reach, next_restart, wait_seconds
from hpctrain.supervision.start import available_launcher


@dataclass(frozen=True, kw_only=True)
class Restart:
    """What is started next, and after which wait."""

    plan: Plan
    attempt: Attempt
    launcher: Launcher | None
    seconds: float


class Supervisor:
    """Decides what follows each failure of a run.

    Args:
        plan: of the first attempt; later ones can have fewer of its hosts.
        attempt: the first one.
        directory: of the run.
        machine: this one.
        notice: gets what the user has to know now.
    """

    def __init__(
        self, plan: Plan, attempt: Attempt, directory: RunDirectory, machine: Machine, notice: Callable[[str], None]
    ) -> None:
        self._plan = plan
        self._directory = directory
        self._machine = machine
        self._notice = notice
        # A script's steps begin at 1 in each attempt: there those attempts count that worked for long.
        self._step = attempt.iteration or int(plan.script is not None)
        self._before = Reach(checkpoint=attempt.iteration, step=self._step)
        self._stepped = False
        self._begin = time.monotonic()

    def see(self, event: Event) -> None:
        """Record the progress of an attempt."""
        if isinstance(event, StartEvent):
            self._stepped = self._plan.script is not None
            self._begin = time.monotonic()
        elif isinstance(event, StepEvent) and self._plan.recipe:
            self._stepped = True
            self._step = max(self._step, event.iteration)

    def further(self, failure: Failure, attempt: Attempt, launcher: Launcher | None) -> Restart | Failure:
        """What follows an attempt that failed without an interrupt: a restart, or the failure that ends the run."""
        try:
            further = attempt_from_here(self._directory, run_events(self._directory))
        except HpctrainError as error:
            message = f"{failure.message}; the run cannot be resumed: {error.message}"
            return replace(failure, message=message, hint=error.hint, exit_code=1)
        try:
            restart = self._restart(failure, attempt, further, launcher) if further else None
            return restart or self._explained(failure, attempt)
        except HpctrainError as error:
            self._notice(f"the run cannot go on by itself: {error.message}")
            return failure

    def _explained(self, failure: Failure, attempt: Attempt) -> Failure:
        """With the changed values that its ranks may not be able to go on with."""
        if self._stepped or not (failure.refused and attempt.iteration):
            return failure
        changes = changes_since(self._directory, attempt.iteration, self._plan)
        if not changes:
            return failure
        values = ", ".join(f"{key} from {old} to {new}" for key, (old, new) in changes.items())
        command = take_back_command(self._directory, changes)
        message = f"{failure.message}; what was changed since step {attempt.iteration}: {values}"
        return replace(failure, message=message, hint=f"to go on without: {command}")

    def _restart(
        self, failure: Failure, attempt: Attempt, further: Attempt, launcher: Launcher | None
    ) -> Restart | None:
        if self._plan.script and time.monotonic() - self._begin > WORK_SECONDS:
            self._step += 1
        before, self._before = self._before, Reach(checkpoint=further.iteration, step=self._step)
        idle, limit = attempt.restart, self._plan.restarts
        hosts = len(self._plan.hosts)
        number = next_restart(failure, before, self._before, stepped=self._stepped, idle=idle, limit=limit, hosts=hosts)
        if number is None:
            return None
        silent = silent_hosts(self._plan, launcher, self._machine, lost=failure.lost_hosts)
        # A host that was lost and answers gets one more chance.
        plan, warnings = plan_without(self._plan, (*silent, *(failure.lost_hosts if number > 1 else ())), self._machine)
        restart = Restart(
            plan=plan,
            attempt=replace(further, restart=number),
            launcher=available_launcher(plan, self._machine),
            seconds=wait_seconds(number),
        )
        self._tell(failure, restart, silent)
        for warning in warnings:
            self._notice(f"warning: {warning}")
        return restart

    def _tell(self, failure: Failure, restart: Restart, silent: tuple[str, ...]) -> None:
        hosts = fold_hosts([host.host for host in restart.plan.hosts])
        others = [host for host in silent if not any(same_host(host, lost) for lost in failure.lost_hosts)]
        unanswered = f"; no answer from {fold_hosts(others)}" if others else ""
        again = f"going on from step {restart.attempt.iteration}" if self._plan.recipe else "starting it again"
        self._notice(
            f"{failure.message}{unanswered}; {again} with {restart.plan.ranks} of {self._plan.ranks} ranks on {hosts} "
            f"in {restart.seconds:g} s (restart {restart.attempt.restart} of {self._plan.restarts})"
        )
