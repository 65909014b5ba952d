"""The output of ``hpctrain run``."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from hpctrain.common.cluster.gpus import smallest_memory, usable_gpus
from hpctrain.common.errors import HpctrainError
from hpctrain.common.files.printable import shell_word
from hpctrain.common.recipes.schema import Recipe
from hpctrain.common.run.directory import RunDirectory, write_json
from hpctrain.common.run.events import line_of
from hpctrain.common.run.plan import Plan, Script
from hpctrain.common.run.resuming import resume_command
from hpctrain.common.run.verified_scripts import note_script
from hpctrain.control.launchers.command import Command
from hpctrain.control.launchers.launcher_choice import needs_proof
from hpctrain.control.planning.mesh import mesh_lines
from hpctrain.control.resuming.attempts import Attempt
from hpctrain.control.supervision.audience import Audience, ReadyRun
from hpctrain.control.supervision.start import command_for
from hpctrain.report.output import answer, say, tell

if TYPE_CHECKING:
    from hpctrain.common.run.events import Event
    from hpctrain.control.supervision.audience import Summary
    from hpctrain.control.supervision.failure import Failure
    from hpctrain.control.supervision.interrupts import Interrupts


class Terminal:
    """The :class:`hpctrain.control.supervision.audience.Output` of a terminal: progress to stderr, results to stdout.

    Console is imported where it is used, because a dry run does not need it.

    Args:
        work: the recipe or script before it is fitted to a number of ranks, as a prediction needs it.
        gpu: the GPU that the run is predicted for; None for no prediction.
    """

    def __init__(self, work: Recipe | Script | None = None, gpu: str | None = None) -> None:
        self._work, self._gpu = work, gpu

    def notice(self, text: str) -> None:
        tell(f"hpctrain: {text}")

    def would_start(self, run: ReadyRun, directory: RunDirectory) -> None:
        """Print the commands for a shell."""
        launcher = run.launcher
        command = command_for(run.plan, directory, run.machine, launcher)
        answer(_shell_text(command, run.plan, directory, run.attempt, launcher.name if launcher else "none"))
        if lines := mesh_lines(run.plan):
            self.notice("\n  ".join(lines))
        if launcher and needs_proof(run.plan):
            self.notice(f"{launcher.name} is the first choice and was not tried; a run uses the first one that works")

    def begun(self, plan: Plan, directory: RunDirectory) -> None:
        """Write the run's prediction, if a GPU was named and there can be one.

        Of ranks that share GPUs only the memory can be predicted: a notice says where it does not suffice.
        """
        if plan.start.share_gpus and (memory := smallest_memory()):
            from hpctrain.control.predict.run_prediction import shared_memory_warning

            if text := shared_memory_warning(plan, memory, usable_gpus()):
                self.notice(f"warning: {text}")
        if self._gpu is None:
            return
        from hpctrain.control.predict.run_prediction import plan_hardware, predict_run
        from hpctrain.report.prediction import prediction_record

        try:
            if not isinstance(self._work, Recipe):
                raise HpctrainError(
                    "HT-prediction-not-possible",
                    "the network of {script} is not known before it runs",
                    script=plan.title,
                )
            found = predict_run(self._work, plan, *plan_hardware(plan, self._gpu))
        except HpctrainError as error:
            self.notice(f"no prediction: {error.message}")
            return
        write_json(directory.prediction, prediction_record(found.prediction))

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

            def failed(failure: Failure, place: RunDirectory) -> None:
                console.close()
                self.notice(failure.without_log_of(shown=0))
                if failure.status == "resumable":
                    tell(f"  to resume: {resume_command(place)}")

            yield Audience(
                show=show,
                output=console.output,
                errors=console.errors,
                shown=console.has_shown,
                notice=console.notice,
                failed=failed,
            )

    def summarise(self, directory: RunDirectory, plan: Plan, status: str) -> Summary:
        from hpctrain.report.summary import summarise

        return summarise(directory, plan, status)

    def ended(self, plan: Plan, directory: RunDirectory, failure: Failure | None, summary: Summary) -> None:
        from hpctrain.report.energy import energy_line

        if not failure:
            print_metrics(plan, summary)
        if (drawn := summary.get("energy_kwh")) is not None:
            each = summary["joules_per_sample"]
            tell(f"energy {energy_line(drawn, summary['energy_covers'], joules_per_sample=each)}")
        if directory.prediction.exists():
            from hpctrain.cli.report import print_comparison

            print_comparison(directory)
        if not failure and plan.script and plan.ranks > 1 and note_script(plan.script.path):
            tell(f"`hpctrain verify` in place of `hpctrain run` proves that {plan.ranks} ranks compute as one process")
        tell(f"report: hpctrain report {shell_word(directory.path)}")


def print_metrics(plan: Plan, summary: Summary) -> None:
    """Print what a run that is done has reached, and of a recipe what its source reports."""
    from hpctrain.report.results import reported_text, result_title

    for name, value in summary["metrics"].items():
        say(f"{name.replace('_', ' ')} {'not finite' if value is None else f'{value:.4f}'}", sys.stdout)
    if plan.recipe:
        tell(f"{result_title(plan.recipe)}, {reported_text(plan.recipe)}")


def _shell_text(command: Command, plan: Plan, directory: RunDirectory, attempt: Attempt | None, launcher: str) -> str:
    """Text for a POSIX shell: it prepares the run directory for the ranks, then runs the command.

    Args:
        attempt: the next one of an earlier run; None for a new run, which the shell refuses to begin in a directory
            that already has a plan.
        launcher: the launcher's name, for the start event.
    """
    folder = RunDirectory(directory.path.absolute())
    steps = [
        # The run directory is private to its owner, and with -C no file is overwritten.
        f"umask 077{'' if attempt else ' && set -C'}",
        f"mkdir -p {_words(folder.logs, folder.ranks)}",
        f"printf '%s\\n' {shlex.quote(plan.model_dump_json())} > {_words(folder.plan)}",
    ]
    if attempt:
        # The start event tells the ranks from which checkpoint to resume. It names no process: no launcher will run.
        written = hashlib.sha256(f"{plan.model_dump_json()}\n".encode()).hexdigest()
        start = attempt.start(plan, launcher).model_copy(update={"host": None, "pid": None, "plan": written})
        steps += [
            f"rm -f {_words(folder.stop, folder.summary)} {_words(folder.ranks)}/rank-*.json",
            f"printf '%s\\n' {shlex.quote(line_of(start).decode().rstrip())} >> {_words(folder.events)}",
        ]
    prepared = " &&\n ".join(steps)
    return f"({prepared}) &&\n{command.shell()}"


def _words(*paths: Path) -> str:
    return shlex.join(map(str, paths))
