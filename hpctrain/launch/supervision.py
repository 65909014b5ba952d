"""Starting a run again that failed: from its newest checkpoint, on the hosts that still answer."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from hpctrain.cluster.host_list import fold_hosts
from hpctrain.errors import HpctrainError
from hpctrain.events import Event
from hpctrain.launch.answering import silent_hosts
from hpctrain.launch.attempts import WORK_SECONDS, Attempt, attempt_from_here, run_events
from hpctrain.launch.command import Launcher
from hpctrain.launch.failure import Failure
from hpctrain.launch.restarts import Reach, next_restart, wait_seconds
from hpctrain.launch.resume import plan_without
from hpctrain.launch.start import available_launcher
from hpctrain.plan import Plan
from hpctrain.planning.machine import Machine, same_host
from hpctrain.rundir import RunDirectory


@dataclass(frozen=True, kw_only=True)
class Restart:
    """What is started next, and after how long a wait."""

    plan: Plan
    attempt: Attempt
    launcher: Launcher | None
    seconds: float


class Supervisor:
    """Decides behind each failure of a run.

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
        # The steps of a script are not known: there those attempts count that worked for long.
        self._step = attempt.iteration or int(plan.script is not None)
        self._before = Reach(checkpoint=attempt.iteration, step=self._step)
        self._begin = time.monotonic()

    def see(self, event: Event) -> None:
        """Take note of how far an attempt gets."""
        if event["event"] == "start":
            self._begin = time.monotonic()
        elif event["event"] == "step":
            self._step = max(self._step, event["iteration"])

    def further(self, failure: Failure, attempt: Attempt, launcher: Launcher | None) -> Restart | None:
        """What follows on an attempt that failed without an interrupt; None where the run ends."""
        try:
            return self._further(failure, attempt, launcher)
        except HpctrainError as error:
            self._notice(f"the run cannot go on by itself: {error.message}")
            return None

    def _further(self, failure: Failure, attempt: Attempt, launcher: Launcher | None) -> Restart | None:
        further = attempt_from_here(self._directory, run_events(self._directory))
        if further is None:
            return None
        if self._plan.script and time.monotonic() - self._begin > WORK_SECONDS:
            self._step += 1
        before, self._before = self._before, Reach(checkpoint=further.iteration, step=self._step)
        idle, limit = attempt.restart, self._plan.restarts
        number = next_restart(failure, before, self._before, idle=idle, limit=limit)
        if number is None:
            return None
        silent = silent_hosts(self._plan, launcher, self._machine)
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
        self._notice(
            f"{failure.message}{unanswered}; going on from step {restart.attempt.iteration} with {restart.plan.ranks} "
            f"of {self._plan.ranks} ranks on {hosts} in {restart.seconds:g} s (restart {restart.attempt.restart} of "
            f"{self._plan.restarts})"
        )
