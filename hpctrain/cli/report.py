"""``hpctrain report``."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from hpctrain.report.output import answer, answer_json, tell


def report(
    target: Annotated[
        # No Path, to which ./last would be what `last` is.
        str,
        typer.Argument(
            metavar="[RUN_DIR|JOBID|last]",
            help="The directory or job of a run, ended or not; by default the last run.",
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
    """Write RUN_DIR/report.html, one page that needs no other file, and print its path."""
    from hpctrain.common.errors import HpctrainError
    from hpctrain.common.run.directory import RunDirectory
    from hpctrain.control.schedulers.find_run import LAST, find_run, last_run
    from hpctrain.report.page import read_summary, write_report

    run_dir = last_run() if target == LAST else Path(target)
    if not os.path.isdir(run_dir):  # noqa: PTH112 - Path.is_dir raises for over-long names
        run_dir = find_run(target).path
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
    if as_json:
        answer_json(read_summary(directory))
        return
    answer(write_report(directory))
