"""``hpctrain compare``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hpctrain.cli.options import AsJson
from hpctrain.report.output import answer_json, print_table

if TYPE_CHECKING:
    from hpctrain.common.run.directory import RunDirectory


def compare(
    targets: Annotated[list[str], typer.Argument(metavar="RUN…", help="Directories or jobs of runs, ended or not.")],
    plot: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Also draw the curves of the runs over each other: .png, .svg or .pdf."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Set runs side by side: their state, metrics and speed, and the arguments and settings in which they differ.

    `--plot FILE` draws their curves over each other, and so does `tensorboard --logdir hpctrain-runs`.
    """
    from rich import box
    from rich.markup import escape
    from rich.table import Table

    from hpctrain.common.run.directory import read_model
    from hpctrain.common.run.plan import Plan
    from hpctrain.control.schedulers.find_run import find_run
    from hpctrain.report.page import read_summary
    from hpctrain.report.runs import differing, value_text

    directories = [find_run(target).directory for target in targets]
    if plot is not None:
        _save_plot(directories, plot)
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


def _save_plot(directories: Sequence[RunDirectory], file: Path) -> None:
    """Write the picture of the runs' curves, named by their folders, or their paths where two have the same."""
    from hpctrain.cli.output_files import require_places, save
    from hpctrain.common.run.events import EventsFile
    from hpctrain.report.pictures import picture_format
    from hpctrain.report.run_curves import plot_runs

    kind = picture_format(file)
    require_places([file])
    names = [directory.path.name for directory in directories]
    names = names if len({*names}) == len(names) else [str(directory.path) for directory in directories]
    runs = {name: EventsFile(directory.events) for name, directory in zip(names, directories, strict=True)}
    save({file: plot_runs(runs, kind)})
