"""Restarts a run from its newest checkpoint after a failure, or on other hosts."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from hpctrain.common.cluster.host_list import fold_hosts
from hpctrain.common.cluster.machine import Machine, same_host
from hpctrain.common.errors import HpctrainError
from hpctrain.common.run import stopping
from hpctrain.common.run.directory import RunDirectory
from hpctrain.common.run.events import Event
from hpctrain.common.run.events.kinds import CheckpointEvent, RecoveredFaultEvent, StallEvent, StartEvent, StepEvent
from hpctrain.common.run.plan import Plan
from hpctrain.common.run.records import ranks_listen
from hpctrain.common.run.stopping import RESUMABLE
from hpctrain.control.hosts.membership import change, chosen_hosts, given_hosts
from hpctrain.control.launchers.command import Launcher
from hpctrain.control.resuming.attempts import WORK_SECONDS, Attempt, attempt_from_here, run_events
from hpctrain.control.resuming.resume import plan_on, plan_without
from hpctrain.control.supervision.audience import ReadyRun
from hpctrain.control.supervision.failure import Failure
from hpctrain.control.supervision.host_questions import silent_hosts
from hpctrain.control.supervision.host_watch import HostWatch
from hpctrain.control.supervision.hosts_ready import drop_unready_hosts
from hpctrain.control.supervision.start import available_launcher

# Hosts that were found unfit are not tried again for this long.
_REFUSED_SECONDS = 600.0


@dataclass(frozen=True, kw_only=True)
class Restart:
    """The next attempt, and the wait before it."""

    plan: Plan
    attempt: Attempt
    launcher: Launcher | None
    seconds: float


class Supervisor:
    """Decides what follows each attempt of a run that is not done.

    Args:
        plan: of the first attempt; later ones can have fewer of its hosts, and in an elastic run others.
        notice: gets what the user has to know now.
    """

    def __init__(
        self, plan: Plan, attempt: Attempt, directory: RunDirectory, machine: Machine, notice: Callable[[str], None]
    ) -> None:
        self._plan = plan
        self._attempt = attempt
        self._directory = directory
        self._machine = machine
        self._notice = notice
        # How far a script's saved state reaches is not known, so its progress is the number of long attempts.
        self._step = attempt.iteration or int(plan.script is not None)
        self._before = Reach(checkpoint=attempt.iteration, step=self._step)
        # When this attempt did its last known step, and since when its ranks have waited for one that hangs.
        self._last_step: float | None = None
        self._stalled: float | None = None
        self._begin = time.monotonic()
        # The plan of the attempt that runs, or ran last.
        self._now = plan
        self._watch: HostWatch | None = None
        # The hosts on which the run continues, once its ranks have saved their state.
        self._wanted: dict[str, int] | None = None
        self._refused: list[tuple[float, dict[str, int]]] = []
        # For an attempt after a change of hosts: the plan before it, and the hosts wanted.
        self._joined: tuple[Plan, dict[str, int]] | None = None
        self._regrown = 0

    @contextlib.contextmanager
    def watching(self, plan: Plan, launcher: Launcher | None) -> Iterator[Callable[[], str | None]]:
        """A context manager for an attempt: its function says why the ranks are to save their state and leave."""
        self._now, self._wanted, self._watch = plan, None, None
        if not plan.elastic or launcher is None:
            yield lambda: None
            return
        with HostWatch(self._ready(plan, launcher), self._directory, self._notice) as self._watch:
            yield self._change_asked

    def _change_asked(self) -> str | None:
        """Why the ranks are to save their state and leave now; None while they are not."""
        if self._plan.script:
            # A script is only known to save its state when it is asked to stop.
            self._accept_hosts()
        return change(self._now, self._wanted) if self._wanted else None

    def _accept_hosts(self) -> None:
        """Decide on the hosts that are wanted now; the decision is kept until the ranks have left."""
        if self._watch and not self._wanted:
            wanted = self._watch.wanted
            self._wanted = wanted if wanted and self._is_acceptable(wanted) else None

    def record(self, event: Event) -> None:
        """Record the progress of an attempt."""
        if isinstance(event, RecoveredFaultEvent) and self._watch:
            self._watch.lost(event)
        elif isinstance(event, CheckpointEvent):
            self._accept_hosts()
        if isinstance(event, StartEvent):
            self._last_step = self._stalled = None
            self._begin = time.monotonic()
        elif isinstance(event, StepEvent):
            self._last_step = time.monotonic()
            if self._plan.recipe:
                self._step = max(self._step, event.iteration)
        elif isinstance(event, StallEvent):
            self._stalled = time.monotonic() - event.seconds

    def next_step(self, failure: Failure, attempt: Attempt, launcher: Launcher | None) -> Restart | Failure:
        """The restart after an attempt that ended without an interrupt, or the failure that ends the run."""
        try:
            further = attempt_from_here(self._directory, run_events(self._directory))
        except HpctrainError as error:
            message = f"{failure.message}; the run cannot be resumed: {error.message}"
            return replace(failure, message=message, hint=error.hint, exit_code=1)
        try:
            if further and self._plan.script and not self._worked_for_long():
                # The count of restarts goes on, or a script with changing hosts could fail for ever.
                further = replace(further, restart=attempt.restart)
            if further and failure.stopped and self._wanted and self._stopped_for(self._wanted):
                return self._restart_on_other_hosts(further, launcher, self._wanted)
            if further and self._joined and not failure.stopped:
                before, wanted = self._joined
                if self._new_hosts_failed(failure, attempt, further, before):
                    return self._restart_on_previous_hosts(failure, further, launcher, before, wanted)
            return (self._restart(failure, attempt, further, launcher) if further else None) or failure
        except HpctrainError as error:
            self._notice(f"the run cannot continue by itself: {error.message}")
            return failure

    def _stopped_for(self, wanted: dict[str, int]) -> bool:
        """Whether ranks that stopped were asked to for these hosts, and not by the user."""
        try:
            return stopping.reason_in(self._directory.stop) == change(self._now, wanted)
        except OSError:
            return False

    def _new_hosts_failed(self, failure: Failure, attempt: Attempt, further: Attempt, before: Plan) -> bool:
        """Whether an attempt for which hosts joined got no further, and not because it lost hosts of before."""
        lost, known = set(failure.lost_hosts), before.ranks_of_hosts.keys()
        if lost and lost <= known:
            return False
        if self._plan.recipe:
            return further.iteration <= attempt.iteration
        # Whether a script saved anything is not known: if it lost only new hosts, its steps do not count.
        lost_new_ones = bool(lost) and not lost & known
        return not self._worked_for_long() and (lost_new_ones or not self._worked)

    @property
    def _worked(self) -> bool:
        """Whether the attempt did a step that is known."""
        return self._last_step is not None

    def _worked_for_long(self) -> bool:
        """Whether an attempt of a script counts as progress. Time spent hanging does not count."""
        return (self._last_step or self._stalled or time.monotonic()) - self._begin > WORK_SECONDS

    def _may_retry(self) -> bool:
        """Whether the attempt got far enough for another one to be worthwhile."""
        if self._worked or self._plan.recipe:
            return self._worked
        # A script is restarted if the user asked for it; an elastic one must have shown that it can be stopped.
        return self._plan.stop.restarts is not None or self._worked_for_long() or ranks_listen(self._directory)

    def _restart(
        self, failure: Failure, attempt: Attempt, further: Attempt, launcher: Launcher | None
    ) -> Restart | None:
        self._joined = None
        if self._plan.script and self._worked_for_long():
            self._step += 1
        before, self._before = self._before, Reach(checkpoint=further.iteration, step=self._step)
        number = next_restart(
            failure,
            before,
            self._before,
            stepped=self._may_retry(),
            idle=attempt.restart,
            limit=self._plan.restarts,
            hosts=len(self._plan.hosts),
        )
        if number is None:
            return None
        whole = self._whole_plan()
        silent = silent_hosts(whole, launcher, self._machine, lost=failure.lost_hosts)
        # A lost host that answers is used in one further attempt.
        plan, warnings = plan_without(whole, (*silent, *(failure.lost_hosts if number > 1 else ())), self._machine)
        if plan.elastic:
            plan = self._drop_unready_hosts(plan, launcher)
        restart = Restart(
            plan=plan,
            attempt=replace(further, restart=number),
            launcher=available_launcher(plan, self._machine),
            seconds=wait_seconds(number),
        )
        self._announce(failure, restart, silent)
        for warning in warnings:
            self._notice(f"warning: {warning}")
        return restart

    def _whole_plan(self) -> Plan:
        """The plan on all hosts that were fit for it, whether they answer or not."""
        if not self._plan.elastic:
            return self._plan
        fit = {host.host for plan in (self._plan, self._now) for host in plan.hosts}
        try:
            return plan_on(
                self._plan,
                chosen_hosts(self._plan, given_hosts(self._plan), fit, self._now.ranks_of_hosts),
                self._machine,
            )[0]
        except HpctrainError as error:
            self._notice(f"warning: the hosts stay as they were: {error.message}")
            return self._now

    def _drop_unready_hosts(self, plan: Plan, launcher: Launcher | None) -> Plan:
        return drop_unready_hosts(self._ready(plan, launcher), self._directory.path, notice=self._notice)

    def _ready(self, plan: Plan, launcher: Launcher | None) -> ReadyRun:
        return ReadyRun(plan=plan, machine=self._machine, launcher=launcher, attempt=self._attempt)

    def _is_acceptable(self, wanted: dict[str, int]) -> bool:
        """Whether these hosts were not found unfit a short time ago."""
        if wanted.keys() == self._now.ranks_of_hosts.keys() and self._regrown >= self._plan.restarts:
            # Repeated losses on the same hosts have a cause that starting there again does not remove.
            return False
        now = time.monotonic()
        return all(refused != wanted or now - since > _REFUSED_SECONDS for since, refused in self._refused)

    def _restart_on_other_hosts(self, further: Attempt, launcher: Launcher | None, wanted: dict[str, int]) -> Restart:
        """The attempt after ranks left for other hosts: there, or on the previous hosts where that is impossible."""
        # The wanted hosts may have changed while the ranks were leaving.
        newest = self._watch and self._watch.wanted
        wanted = newest if newest and self._is_acceptable(newest) else wanted
        before = self._now
        self._regrown += wanted.keys() == before.ranks_of_hosts.keys()
        # A host that was to join may have been withdrawn while the ranks saved their state.
        with contextlib.suppress(HpctrainError):
            wanted = chosen_hosts(self._plan, given_hosts(self._plan), wanted.keys(), wanted) or wanted
        self._joined = before, wanted
        try:
            plan, warnings = plan_on(self._plan, wanted, self._machine)
            plan = self._drop_unready_hosts(plan, launcher)
            found = available_launcher(plan, self._machine)
        except HpctrainError as error:
            self._notice(f"warning: {change(before, wanted)} is not possible: {error.message}")
            plan, warnings, found = before, (), launcher
        if plan.hosts == before.hosts and wanted != before.ranks_of_hosts:
            self._refused.append((time.monotonic(), wanted))
        hosts = fold_hosts([host.host for host in plan.hosts])
        numbers = f"{before.ranks} ranks until now, {plan.ranks} from now on"
        self._notice(f"{self._resume_text(further)} on {hosts}: {numbers}")
        for warning in warnings:
            self._notice(f"warning: {warning}")
        return Restart(plan=plan, attempt=further, launcher=found, seconds=0.0)

    def _restart_on_previous_hosts(
        self, failure: Failure, further: Attempt, launcher: Launcher | None, before: Plan, wanted: dict[str, int]
    ) -> Restart:
        """The attempt after one without progress on new hosts: on the previous hosts, as far as they answer."""
        self._joined = None
        self._refused.append((time.monotonic(), wanted))
        plan = self._drop_unready_hosts(before, launcher)
        hosts = fold_hosts([host.host for host in plan.hosts])
        self._notice(f"{failure.message}; {self._resume_text(further)} as before, on {hosts}")
        return Restart(plan=plan, attempt=further, launcher=available_launcher(plan, self._machine), seconds=1.0)

    def _resume_text(self, attempt: Attempt) -> str:
        return f"resuming from step {attempt.iteration}" if self._plan.recipe else "starting it again"

    def _announce(self, failure: Failure, restart: Restart, silent: tuple[str, ...]) -> None:
        hosts = fold_hosts([host.host for host in restart.plan.hosts])
        others = [host for host in silent if not any(same_host(host, lost) for lost in failure.lost_hosts)]
        unanswered = f"; no answer from {fold_hosts(others)}" if others else ""
        self._notice(
            f"{failure.message}{unanswered}; {self._resume_text(restart.attempt)} with {restart.plan.ranks} of "
            f"{max(self._plan.ranks, restart.plan.ranks)} ranks on {hosts} "
            f"in {restart.seconds:g} s (restart {restart.attempt.restart} of {self._plan.restarts})"
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
