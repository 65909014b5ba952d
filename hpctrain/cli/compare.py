"""``hpctrain compare``."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from hpctrain.cli.options import AsJson
from hpctrain.report.output import answer_json, print_table


def compare(
    targets: Annotated[list[str], typer.Argument(metavar="RUN…", help="Directories or jobs of runs, ended or not.")],
    as_json: AsJson = False,
) -> None:
    """Set runs side by side: their state, metrics and speed, and the arguments and settings in which they differ.

    `tensorboard --logdir hpctrain-runs` draws their curves over each other.
    """
    from rich import box
    from rich.markup import escape
    from rich.table import Table

    from hpctrain.common.run.directory import read_model
    from hpctrain.common.run.plan import Plan
    from hpctrain.control.schedulers.find_run import find_run
    from hpctrain.report.page import read_summary
    from hpctrain.report.runs import differing, value_text

    directories = [find_run(target) for target in targets]
    differences = differing([read_model(directory.plan, Plan) for directory in directories])
    summaries = [read_summary(directory) for directory in directories]
    names = dict.fromkeys(name for summary in summaries for name in summary["metrics"])
    figures: dict[str, list[Any]] = {
        "status": [summary["status"] for summary in summaries],
        **{name: [summary["metrics"].get(name) for summary in summaries] for name in names},
        **{key: [summary.get(key) for summary in summaries] for key in ("steps", "samples_per_s", "seconds")},
    }
    figures = {name: values for name, values in figures.items() if values != [None] * len(values)}
    if as_json:
        runs = [str(directory.path) for directory in directories]
        answer_json({"runs": runs, "figures": figures, "differences": differences})
        return
    table = Table(box=box.SIMPLE_HEAD)
    for title in ("", *(directory.path.name for directory in directories)):
        table.add_column(escape(title), overflow="fold")
    for rows in (figures, differences):
        for name, values in rows.items():
            cells = [f"{value:.6g}" if isinstance(value, float) else value_text(value) for value in values]
            table.add_row(*map(escape, (value_text(name), *cells)))
        table.add_section()
    print_table(table)
