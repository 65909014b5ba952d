"""Watches, while an elastic run trains, for further hosts that it could use, and for hosts that it has to leave."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection
from typing import Self

from hpctrain.common.errors import HpctrainError
from hpctrain.common.run.directory import RunDirectory
from hpctrain.common.run.events.kinds import RecoveredFaultEvent
from hpctrain.common.run.records import ranks_listen
from hpctrain.common.settings import HOST_INTERVAL
from hpctrain.control.hosts.membership import change, chosen_hosts, given_hosts
from hpctrain.control.resuming.resume import plan_on
from hpctrain.control.supervision.audience import ReadyRun
from hpctrain.control.supervision.hosts_ready import joinable_hosts


class HostWatch:
    """Looks at hosts in a thread of its own while an attempt runs; a context manager.

    Args:
        notice: gets, once each, what keeps a host that answers from joining.

    Attributes:
        wanted: the hosts with their ranks that the run is to have, where they are others than it has now; else None.
    """

    def __init__(self, run: ReadyRun, directory: RunDirectory, notice: Callable[[str], None]) -> None:
        self._run = run
        self._plan = run.plan
        self._directory = directory
        self._notice = notice
        self._seconds = HOST_INTERVAL.read()
        # The number of live ranks on each host.
        self._now = run.plan.ranks_of_hosts
        self._leaving: Collection[str] = ()
        self._warnings: set[str] = set()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="hpctrain-host-watch", daemon=True)
        self.wanted: dict[str, int] | None = None

    def lost(self, event: RecoveredFaultEvent) -> None:
        """Count a rank that the others went on without."""
        hosts = [host.host for host in self._plan.hosts for _ in range(host.slots)]
        # The event's host is what the host calls itself, so the plan's name is found by the rank.
        if event.rank is not None and self._now[hosts[event.rank]]:
            self._now[hosts[event.rank]] -= 1

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *raised: object) -> None:
        self._ended.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._ended.wait(self._seconds):
            try:
                self._check_hosts()
            except HpctrainError as error:
                self._want(None)
                self._warn_once(f"the hosts stay as they are: {error.message}")
            except (OSError, RuntimeError) as error:
                # The system could not make a process or thread.
                self._want(None)
                self._warn_once(f"the hosts stay as they are: {error}")

    def _check_hosts(self) -> None:
        given = given_hosts(self._plan)
        now = {host: ranks for host, ranks in self._now.items() if ranks}
        others = [host for host in given if host not in now]
        joining: tuple[str, ...] = ()
        if others:
            joining, wrong = joinable_hosts(self._run, others, self._directory.path, self._ended)
            for host, fault in wrong.items():
                self._warn_once(f"{host} cannot join: it {fault}")
        chosen = chosen_hosts(self._plan, given, {*now, *joining}, now)
        same = chosen.keys() == now.keys() and sum(chosen.values()) == sum(now.values())
        if same:
            self._leaving = ()
            self._want(None)
            return
        # Raises if the number of ranks or the fabric forbids these hosts, before any rank stops for them.
        plan_on(self._plan, chosen, self._run.machine)
        # Hosts are left only if two looks agree, because a hostfile may be half written.
        leaving, before = now.keys() - chosen.keys(), self._leaving
        self._leaving = leaving
        settled = leaving == before or not leaving
        if settled and self._plan.script and not ranks_listen(self._directory):
            self._warn_once(f"{change(self._plan, chosen)}, but not before the script has called ht.should_stop()")
            settled = False
        self._want(chosen if settled else None)

    def _want(self, hosts: dict[str, int] | None) -> None:
        if not self._ended.is_set():
            self.wanted = hosts

    def _warn_once(self, text: str) -> None:
        if text not in self._warnings and not self._ended.is_set():
            self._warnings.add(text)
            self._notice(f"warning: {text}")
