"""What is asked of a run, and who is told what becomes of it."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from hpctrain.launch.attempts import Attempt
from hpctrain.launch.command import Launcher
from hpctrain.planning.machine import Machine
from hpctrain.recipes.schema import Recipe
from hpctrain.run.directory import RunDirectory
from hpctrain.run.plan import Plan, Script

if TYPE_CHECKING:
    from hpctrain.supervision.execution import Audience, Summary
    from hpctrain.supervision.failure import Failure
    from hpctrain.supervision.repeats import Series


@dataclass(frozen=True, kw_only=True)
class RunRequest:
    """What ``hpctrain run`` is asked for.

    Attributes:
        work: with what ``--set`` changes, where it is named.
        overrides: where it is not: of the recipe of the run that goes on.
        accept_changes: go on with another recipe or script than the run was begun with.
        ranks: how many; None for what the hosts have slots for, or what the run had.
        run_dir: None for a new directory.
        repeat: how many seeds; None for one run.
        dry_run: start nothing, and write nothing.
        oversubscribe: let ranks share cores.
        host_options, start, stop: the fields that were given of what a plan has under these names.
    """

    work: Recipe | Script | None
    overrides: tuple[str, ...] = ()
    accept_changes: bool = False
    ranks: int | None = None
    backend: str | None = None
    framework: str | None = None
    run_dir: Path | None = None
    repeat: int | None = None
    dry_run: bool = False
    oversubscribe: bool = False
    host_options: Mapping[str, Any] = field(default_factory=dict)
    start: Mapping[str, Any] = field(default_factory=dict)
    stop: Mapping[str, Any] = field(default_factory=dict)

    @property
    def changes(self) -> dict[str, Mapping[str, Any]]:
        """What goes before the plan of a run that goes on."""
        return {"host_options": self.host_options, "start": self.start, "stop": self.stop}


@dataclass(frozen=True, kw_only=True)
class ReadyRun:
    """A run whose ranks can be started.

    Attributes:
        machine: this one.
        launcher: what starts the ranks; None for the backend ``single``.
        attempt: where a run goes on; None for one that begins.
    """

    plan: Plan
    machine: Machine
    launcher: Launcher | None
    attempt: Attempt | None = None


class Output(Protocol):
    """Shows a user what becomes of a request."""

    def notice(self, text: str) -> None:
        """What the user has to know before a run, or between two."""

    def would_start(self, run: ReadyRun, directory: RunDirectory) -> None:
        """What a dry run finds."""

    def follow(self, directory: RunDirectory) -> AbstractContextManager[Audience]:
        """Who follows the run of a directory."""

    def summarise(self, directory: RunDirectory, plan: Plan, status: str) -> Summary:
        """The content of ``summary.json``, from the events and the run's status."""

    def ended(self, plan: Plan, directory: RunDirectory, failure: Failure | None, summary: Summary) -> None:
        """A run came to its end, or failed."""

    def series_ended(self, series: Series) -> None:
        """All seeds are done, or one is not."""
