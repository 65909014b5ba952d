"""A request for a run, and the interface through which its progress is reported."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from hpctrain.common.cluster.machine import Machine
    from hpctrain.common.recipes.schema import Recipe
    from hpctrain.common.recipes.tracking import Tracker
    from hpctrain.common.run.directory import RunDirectory
    from hpctrain.common.run.plan import Plan, Script
    from hpctrain.control.launchers.command import Launcher
    from hpctrain.control.resuming.attempts import Attempt
    from hpctrain.control.supervision.execution import Audience, Summary
    from hpctrain.control.supervision.failure import Failure
    from hpctrain.control.supervision.repeats import Series

MOST_SEEDS = 1000
"""How many runs a series can have."""


@dataclass(frozen=True, kw_only=True)
class RunRequest:
    """The arguments of ``hpctrain run``.

    Attributes:
        work: the recipe, with the changes of ``--set``, or the script; None to resume a run with its own.
        overrides: ``key=value`` each, for the recipe or script of the resumed run where ``work`` is None.
        mesh: as ``--mesh`` has it, for the resumed run where ``work`` is None.
        tracking: where the resumed run's curves go; None for where they went, or ``work``'s go.
        accept_changes: resume with another recipe or script than the run was begun with.
        ranks: their number; None for as many as the hosts have slots, or as the resumed run had.
        run_dir: the run directory; None for a new one.
        submitted: a plan's file, with which a resumed run begins where its directory holds none.
        repeat: the number of seeds; None for a single run.
        dry_run: start nothing and write nothing.
        host_options, start, stop: the fields of the plan's attributes of these names that the user gave.
    """

    work: Recipe | Script | None
    overrides: tuple[str, ...] = ()
    mesh: str | None = None
    tracking: tuple[Tracker, ...] | None = None
    accept_changes: bool = False
    ranks: int | None = None
    backend: str | None = None
    framework: str | None = None
    run_dir: Path | None = None
    submitted: Path | None = None
    repeat: int | None = None
    dry_run: bool = False
    oversubscribe: bool = False
    host_options: Mapping[str, Any] = field(default_factory=dict)
    start: Mapping[str, Any] = field(default_factory=dict)
    stop: Mapping[str, Any] = field(default_factory=dict)

    @property
    def changes(self) -> dict[str, Mapping[str, Any]]:
        """The fields that take precedence over the plan of a resumed run."""
        return {"host_options": self.host_options, "start": self.start, "stop": self.stop}


@dataclass(frozen=True, kw_only=True)
class ReadyRun:
    """A run that is ready to start.

    Attributes:
        launcher: starts the ranks; None for a backend that needs none.
        attempt: where a resumed run continues; None for a new run.
    """

    plan: Plan
    machine: Machine
    launcher: Launcher | None
    attempt: Attempt | None = None


class Output(Protocol):
    """Reports to the user."""

    def notice(self, text: str) -> None:
        """Tell the user something before a run, or between two runs."""

    def would_start(self, run: ReadyRun, directory: RunDirectory) -> None:
        """Show how a run would be started, in a dry run."""

    def begun(self, plan: Plan, directory: RunDirectory) -> None:
        """A new run's directory is made, and its ranks are not started yet."""

    def follow(self, plan: Plan, directory: RunDirectory) -> AbstractContextManager[Audience]:
        """The audience of a run; it is left when the run has ended."""

    def summarise(self, directory: RunDirectory, plan: Plan, status: str) -> Summary:
        """Compute the content of ``summary.json`` from the events and the run's status."""

    def ended(self, plan: Plan, directory: RunDirectory, failure: Failure | None, summary: Summary) -> None:
        """Report the end of a run; ``failure`` is None where it is done."""

    def series_ended(self, series: Series) -> None:
        """Report the results of a series, after its last run or the first that failed."""
