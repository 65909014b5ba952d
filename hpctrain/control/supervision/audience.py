"""A run that is ready to start, and who is told of its progress."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from hpctrain.control.resuming.attempts import Attempt

if TYPE_CHECKING:
    from hpctrain.common.cluster.machine import Machine
    from hpctrain.common.run.directory import RunDirectory
    from hpctrain.common.run.events import Event
    from hpctrain.common.run.plan import Plan
    from hpctrain.control.launchers.command import Launcher
    from hpctrain.control.supervision.failure import Failure
    from hpctrain.control.supervision.interrupts import Interrupts

Summary = dict[str, Any]
"""The content of ``summary.json``."""


@dataclass(frozen=True, kw_only=True)
class ReadyRun:
    """A run that is ready to start.

    Attributes:
        launcher: starts the ranks; None for a backend that needs none.
        attempt: where it begins, or goes on.
    """

    plan: Plan
    machine: Machine
    launcher: Launcher | None
    attempt: Attempt = field(default_factory=Attempt)


def _ignore(*news: object) -> None:
    """Tell nobody."""


@dataclass(frozen=True, kw_only=True)
class Audience:
    """Where the remarks, warnings and progress of a run go; by default nowhere.

    Attributes:
        show: gets each event as it happens.
        output: gets what rank 0 prints as it comes, which may end in the middle of a line.
        notice: gets what the user has to know now.
        failed: gets why the run is not done before any of it is written, which a full disk would refuse.
    """

    show: Callable[[Event], None] = _ignore
    output: Callable[[str], None] = _ignore
    notice: Callable[[str], None] = _ignore
    failed: Callable[[Failure], None] = _ignore


@dataclass(frozen=True, kw_only=True)
class LiveRun:
    """A run that this process carries out: its directory, where its signals are collected, and who is told."""

    directory: RunDirectory
    interrupts: Interrupts
    audience: Audience


class Output(Protocol):
    """What a command reports of its runs; :meth:`follow` gives the :class:`Audience` of each."""

    def notice(self, text: str) -> None:
        """Tell the user something before a run, or between two runs."""

    def would_start(self, run: ReadyRun, directory: RunDirectory) -> None:
        """Show how a run would be started, in a dry run."""

    def follow(self, plan: Plan, directory: RunDirectory, interrupts: Interrupts) -> AbstractContextManager[Audience]:
        """The audience of a run; it is left when the run has ended."""

    def summarise(self, directory: RunDirectory, plan: Plan, status: str) -> Summary:
        """Compute the content of ``summary.json`` from the events and the run's status."""

    def ended(self, plan: Plan, directory: RunDirectory, failure: Failure | None, summary: Summary) -> None:
        """Report the end of a run; ``failure`` is None where it is done."""
