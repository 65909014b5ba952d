"""``hpctrain report``."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hpctrain.report.output import answer, answer_json, say, tell

if TYPE_CHECKING:
    from hpctrain.common.run.directory import RunDirectory


def report(
    target: Annotated[
        # No Path, to which ./last would be what `last` is.
        str,
        typer.Argument(
            metavar="[RUN_DIR|JOBID|last]",
            help="The directory or job of a run, a series or an array, ended or not; by default the last run.",
            show_default=False,
        ),
    ] = "last",
    tracking: Annotated[
        str | None,
        typer.Option(
            "--tracking",
            metavar="NAME,…",
            help="Send all of the run to tensorboard, mlflow or wandb; write no page.",
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the summary as JSON; write no page.")] = False,
) -> None:
    """Write RUN_DIR/report.html, one page that needs no other file, and print its path.

    If the run was predicted, its measured figures are set beside the prediction.
    """
    from hpctrain.common.errors import HpctrainError
    from hpctrain.common.files.printable import shell_word
    from hpctrain.common.run.directory import RunDirectory
    from hpctrain.control.schedulers.find_run import LAST, find_run, last_run
    from hpctrain.report.page import read_summary, write_report

    run_dir = last_run() if target == LAST else Path(target)
    if not os.path.isdir(run_dir):  # noqa: PTH112 - Path.is_dir raises for over-long names
        run_dir = find_run(target).directory.path
    if tracking is not None:
        if as_json:
            raise HpctrainError(
                "HT-options-exclude-each-other",
                "--tracking sends a run, and --json is about its report",
                "give them in separate commands",
            )
        from hpctrain.report.tracking.sending import send_later

        raise typer.Exit(send_later(run_dir, tracking, lambda text: tell(f"hpctrain: {text}")))
    directory = RunDirectory(run_dir)
    if directory.submission.exists() and not directory.plan.exists():
        raise HpctrainError(
            "HT-run-is-several",
            "{path} is an array of jobs, and a report is of one run",
            f"name a task: {shell_word(run_dir)}/task-N; hpctrain compare sets several side by side",
            path=run_dir,
        )
    if as_json:
        answer_json(read_summary(directory))
        return
    page = write_report(directory)
    print_comparison(directory)
    answer(page)


def print_comparison(directory: RunDirectory) -> None:
    """Print the comparison on stderr; nothing without a prediction.

    Raises:
        HpctrainError: the directory holds no run.
    """
    from hpctrain.report.page import read_comparison

    comparison, fault = read_comparison(directory)
    if fault:
        say(f"hpctrain: warning: {fault}", sys.stderr)
    for line in comparison.lines if comparison else ():
        say(line, sys.stderr)
