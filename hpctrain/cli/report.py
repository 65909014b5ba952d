"""``hpctrain report``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hpctrain.cli.options import Target
from hpctrain.report.output import answer, answer_json


def report(
    target: Target = "last",
    as_json: Annotated[bool, typer.Option("--json", help="Print the summary as JSON; write no page.")] = False,
) -> None:
    """Write RUN_DIR/report.html, one page that needs no other file, and print its path."""
    from hpctrain.control.schedulers.run_jobs import find_run
    from hpctrain.report.page import read_summary, write_report

    directory = find_run(target)
    if as_json:
        answer_json(read_summary(directory))
        return
    page, here = write_report(directory), Path.cwd()
    answer(page.relative_to(here) if page.is_relative_to(here) else page)
