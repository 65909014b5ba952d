"""``hpctrain report``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def report(
    run_dir: Annotated[Path, typer.Argument(metavar="RUN_DIR", help="The directory of a run, finished or not.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print the summary as JSON; write no page.")] = False,
) -> None:
    """Write RUN_DIR/report.html, one page that needs no other file, and print its path."""
    import json

    from hpctrain.report.page import read_summary, write_report
    from hpctrain.rundir import RunDirectory

    directory = RunDirectory(run_dir)
    typer.echo(json.dumps(read_summary(directory), indent=2) if as_json else write_report(directory))
