"""The pods of an Indexed Job: the first runs the training as on any machine, and the others take part in its attempts.

They communicate by the run directory, which all of them see: an attempt has begun once the events record it.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from collections.abc import Sequence

from hpctrain.common.cluster.machine import this_machine
from hpctrain.common.errors import HpctrainError
from hpctrain.common.run.directory import RunDirectory, read_model
from hpctrain.common.run.events import Event, parse_event
from hpctrain.common.run.events.kinds import EndEvent, StartEvent
from hpctrain.common.run.plan import Plan
from hpctrain.common.run.stopping import RESUMABLE, ask
from hpctrain.common.stderr import tell
from hpctrain.control.launchers.command import Torchrun
from hpctrain.control.launchers.launcher_choice import command_for, first_launcher
from hpctrain.control.launchers.processes import end_processes
from hpctrain.control.resuming.attempts import is_done
from hpctrain.control.supervision.follow import Tail
from hpctrain.control.supervision.hosts_ready import PODS_SECONDS
from hpctrain.control.supervision.interrupts import Interrupts

_POLL_SECONDS = 0.5
# The first pod gives its own ranks the same time.
_FINALIZE_SECONDS = 60.0
_EXIT_CODES = {"done": 0, "failed": 1, "resumable": RESUMABLE}


def take_part(directory: RunDirectory, *, seconds: float = PODS_SECONDS, poll: float = _POLL_SECONDS) -> int:
    """Start this pod's ranks in each attempt that the first pod begins, until the run ends.

    A signal asks the ranks of all pods to save their state and leave.

    Args:
        directory: of the run; need not be there yet.
        seconds: how long this pod waits while nothing runs here.
        poll: time between two looks at the run.

    Returns:
        The exit code of the first pod, so that all pods of a run succeed, fail or are restarted together.

    Raises:
        HpctrainError: this pod is none of the run's hosts, or its plan is damaged.
    """
    with Interrupts() as interrupts:
        pod = _Pod(directory)
        try:
            while (code := pod.look()) is None:
                if not interrupts.wait(poll):
                    return pod.leave(interrupts)
                if pod.idle_seconds > seconds:
                    tell(f"hpctrain: the first pod started nothing within {seconds:g} s: does it run? kubectl get pods")
                    return RESUMABLE
            return code
        finally:
            pod.stop()


class _Pod:
    """This pod's part in a run: the launcher of its ranks, while an attempt runs."""

    def __init__(self, directory: RunDirectory) -> None:
        self._directory = directory
        self._process: subprocess.Popen[bytes] | None = None
        self._since = time.monotonic()
        self._events: list[Event] = []
        self._size = 0
        self._tail = Tail(directory.events, whole=True)
        # The last attempt that this pod took part in, or came too late for; None before the first look.
        self._attempt: int | None = None
        self._missed: int | None = None

    @property
    def idle_seconds(self) -> float:
        """For how long nothing runs here."""
        return 0.0 if self._process else time.monotonic() - self._since

    def look(self) -> int | None:
        """Follow the events; returns the exit code when the run has ended."""
        if self._process and self._process.poll() is not None:
            self.stop()
        events = self._newest()
        if events is None:
            return None
        if is_done(events):
            # Rank 0 records the end while other ranks are still leaving.
            leaving = self._process is not None and time.time() - events[-1].time < _FINALIZE_SECONDS
            return None if leaving else 0
        starts = [event.attempt for event in events if isinstance(event, StartEvent)]
        newest = starts[-1] if starts else 0
        if self._missed is None:
            self._missed = self._attempt = newest - self._may_join(events)
        if newest == self._missed:
            return None
        if isinstance(last := events[-1], EndEvent):
            return _EXIT_CODES[last.status]
        if newest != self._attempt:
            self._begin(newest)
        return None

    def _newest(self) -> list[Event] | None:
        """All start and end events so far; None while they cannot be read.

        A file server may show the end of a growing file late, or as zeros at first.
        """
        path = self._directory.events
        try:
            size = path.stat().st_size if path.exists() else 0
            if size < self._size:
                # A resuming attempt removes a last line that a crash has cut short.
                self._restart_reading()
            self._size = size
            while lines := self._tail.lines():
                # Nearly all events of a long run are steps, which are not parsed; a line of zeros could be any event.
                kept = [line for line in lines if any(each in line for each in (b'"start"', b'"end"', b"\0"))]
                events = (parse_event(line, str(path)) for line in kept)
                self._events += [event for event in events if isinstance(event, StartEvent | EndEvent)]
        except (OSError, HpctrainError):
            self._restart_reading()
            return None
        return self._events

    def _restart_reading(self) -> None:
        self._tail, self._size, self._events = Tail(self._directory.events, whole=True), 0, []

    def leave(self, interrupts: Interrupts) -> int:
        """Ask all ranks to save their state and leave, and wait for those of this pod; returns the exit code."""
        if self._process is None:
            return RESUMABLE
        name, limit = interrupts.received[0].name, self._plan().stop.seconds
        with contextlib.suppress(HpctrainError):
            ask(self._directory.stop, name)
        tell(f"hpctrain: {name}: waiting up to {limit:g} s for the ranks to end their step and save their state")
        deadline = time.monotonic() + limit
        while self._process.poll() is None and time.monotonic() < deadline and not interrupts.second_signal:
            time.sleep(_POLL_SECONDS)
        return RESUMABLE

    def stop(self) -> None:
        """End the processes of this pod that are alive."""
        if self._process:
            end_processes(self._process, self._directory)
            self._process, self._since = None, time.monotonic()

    def _begin(self, attempt: int) -> None:
        self.stop()
        self._attempt = attempt
        plan = self._plan()
        command = command_for(plan, self._directory, this_machine(), first_launcher(plan), attempt=attempt)
        tell(f"hpctrain: attempt {attempt} starts, and with it the ranks of this pod")
        # Kubernetes keeps what a pod prints as its log.
        self._process = command.start(output=sys.stderr)

    def _may_join(self, events: Sequence[Event]) -> bool:
        """Whether the newest attempt runs, and has had no ranks of a pod that was here before this one."""
        if not events or isinstance(events[-1], EndEvent):
            return False
        plan = self._plan()
        launcher = first_launcher(plan)
        assert isinstance(launcher, Torchrun)
        first = sum(host.slots for host in plan.hosts[: launcher.node])
        ranks = range(first, first + plan.hosts[launcher.node].slots)
        return not any(self._directory.rank(rank).exists() for rank in ranks)

    def _plan(self) -> Plan:
        return read_model(self._directory.plan, Plan)
