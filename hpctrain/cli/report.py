"""``hpctrain report``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def report(
    run_dir: Annotated[
        Path, typer.Argument(metavar="RUN_DIR", help="The directory of a run or a series, finished or not.")
    ],
    as_json: Annotated[bool, typer.Option("--json", help="Print the summary as JSON; write no page.")] = False,
) -> None:
    """Write RUN_DIR/report.html, one page that needs no other file, and print its path."""
    import json

    from hpctrain.report.page import read_summary, write_report
    from hpctrain.report.repeats import read_repeats, write_repeats_report
    from hpctrain.run.directory import RunDirectory
    from hpctrain.supervision.repeats import read_series

    directory = RunDirectory(run_dir)
    if series := read_series(run_dir):
        typer.echo(read_repeats(series).model_dump_json(indent=2) if as_json else write_repeats_report(series))
        return
    typer.echo(json.dumps(read_summary(directory), indent=2) if as_json else write_report(directory))
