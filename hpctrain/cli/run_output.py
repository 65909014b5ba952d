"""The output of ``hpctrain run``."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

from hpctrain.common.files.printable import shell_word
from hpctrain.common.run.directory import RunDirectory, resume_command
from hpctrain.common.run.plan import Plan
from hpctrain.control.launchers.launcher_choice import command_for, needs_proof
from hpctrain.control.planning.mesh_plan import mesh_lines
from hpctrain.control.supervision.audience import Audience, ReadyRun
from hpctrain.report.output import answer, say, tell

if TYPE_CHECKING:
    from hpctrain.common.run.events import Event
    from hpctrain.control.supervision.audience import Summary
    from hpctrain.control.supervision.failure import Failure
    from hpctrain.control.supervision.interrupts import Interrupts


class Terminal:
    """The :class:`hpctrain.control.supervision.audience.Output` of a terminal: progress to stderr, results to stdout.

    Console is imported where it is used, because a dry run does not need it.
    """

    def notice(self, text: str) -> None:
        tell(f"hpctrain: {text}")

    def would_start(self, run: ReadyRun, directory: RunDirectory) -> None:
        """Print the command that would start the ranks."""
        launcher = run.launcher
        answer(command_for(run.plan, directory, run.machine, launcher).shell())
        if lines := mesh_lines(run.plan):
            self.notice("\n  ".join(lines))
        if launcher and needs_proof(run.plan):
            self.notice(f"{launcher.name} is the first choice and was not tried; a run uses the first one that works")

    @contextlib.contextmanager
    def follow(self, plan: Plan, directory: RunDirectory, interrupts: Interrupts) -> Iterator[Audience]:
        from hpctrain.report.console import Console
        from hpctrain.report.tracking.sending import Trackers

        with contextlib.ExitStack() as stack:
            console = stack.enter_context(Console())
            over = functools.partial(interrupts.over, plan.stop.seconds)
            trackers = stack.enter_context(Trackers(plan.trackers, directory, console.notice, over))

            def show(event: Event) -> None:
                console.show(event)
                trackers.give(event)

            def failed(failure: Failure) -> None:
                console.close()
                self.notice(failure.without_log_of(shown=0))
                if failure.status == "resumable":
                    tell(f"  to resume: {resume_command(directory)}")

            yield Audience(
                show=show,
                output=console.output,
                notice=console.notice,
                failed=failed,
            )

    def summarise(self, directory: RunDirectory, plan: Plan, status: str) -> Summary:
        from hpctrain.report.summary import summarise

        return summarise(directory, plan, status)

    def ended(self, plan: Plan, directory: RunDirectory, failure: Failure | None, summary: Summary) -> None:
        from hpctrain.report.run_energy import energy_text

        if not failure:
            print_metrics(plan, summary)
        if (drawn := summary.get("energy_kwh")) is not None:
            joules = summary["joules_per_sample"]
            each = "" if joules is None else f", {joules:.3g} J a sample"
            tell(f"energy {energy_text(drawn)}{each}: {summary['energy_covers']}")
        tell(f"report: hpctrain report {shell_word(directory.path)}")


def print_metrics(plan: Plan, summary: Summary) -> None:
    """Print what a run that is done has reached, and of a recipe what its source reports."""
    from hpctrain.report.results import reported_text, result_title

    for name, value in summary["metrics"].items():
        say(f"{name.replace('_', ' ')} {'not finite' if value is None else f'{value:.4f}'}", sys.stdout)
    if plan.recipe:
        tell(f"{result_title(plan.recipe)}, {reported_text(plan.recipe)}")
