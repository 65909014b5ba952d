"""The results of a recipe with several seeds: mean and deviation, beside those that its source reports."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import BaseModel

from hpctrain.common.errors import HpctrainError
from hpctrain.common.files.whole import write_whole
from hpctrain.common.recipes.schema import Recipe
from hpctrain.common.recipes.sections import Reported
from hpctrain.common.run.directory import RunDirectory, read_model, write_json
from hpctrain.common.run.plan import Plan
from hpctrain.control.supervision.repeats import Series
from hpctrain.report.page import read_summary, settings, template
from hpctrain.report.results import finite, reported_rows, reported_text, result_name, result_title

if TYPE_CHECKING:
    from rich.table import Table


class RepeatResult(BaseModel):
    """The result of one seed; ``value`` is None if it is not known or not finite."""

    seed: int
    status: str
    value: float | None


class Repeats(BaseModel):
    """The content of ``repeats.json``.

    Attributes:
        seeds: those that were asked for.
        metric: the key in the runs' summaries; ``title`` is what people read.
        batch: the samples of one step over all ranks.
        mean, deviation: over the runs that are done; the deviation is the sample's, and needs two runs. None where a
            result is not finite.
        reported: the source's rows for this batch, in words ``reported_text``.
    """

    recipe: str
    source: str
    framework: str | None
    ranks: int
    batch: int
    seeds: tuple[int, ...]
    metric: str
    title: str
    runs: tuple[RepeatResult, ...]
    mean: float | None
    deviation: float | None
    reported: tuple[Reported, ...]
    reported_text: str

    @property
    def done(self) -> int:
        """The number of runs that are done."""
        return sum(run.status == "done" for run in self.runs)

    @property
    def rows(self) -> list[tuple[str, str, str]]:
        """Seed, status and result of each run, followed by mean and deviation."""
        rows = [(str(run.seed), run.status, _figure(run.value)) for run in self.runs]
        return [*rows, ("mean", f"{self.done} of {len(self.seeds)} done", self.mean_text)]

    @property
    def mean_text(self) -> str:
        """Mean and deviation as ``0.9881 ± 0.0042``."""
        return _figure(self.mean) + ("" if self.deviation is None else f" ± {self.deviation:.4f}")


def repeats_of(plan: Plan, recipe: Recipe, runs: Sequence[RepeatResult]) -> Repeats:
    """The results of these runs; ``plan`` and its ``recipe`` are those of one of them."""
    values = [run.value for run in runs if run.status == "done"]
    return Repeats(
        recipe=recipe.name,
        source=recipe.source,
        framework=plan.framework,
        ranks=plan.ranks,
        batch=recipe.global_batch,
        seeds=tuple(run.seed for run in runs),
        metric=result_name(recipe),
        title=result_title(recipe),
        runs=tuple(runs),
        mean=finite(statistics.mean, values),
        deviation=finite(statistics.stdev, values, least=2),
        reported=tuple(reported_rows(recipe)),
        reported_text=reported_text(recipe),
    )


def read_repeats(series: Series) -> Repeats:
    """Read the results so far.

    Raises:
        HpctrainError: a file of a run is damaged or missing.
    """
    plan, recipe = _first(series)
    return repeats_of(plan, recipe, [_result(recipe, seed, run) for seed, run in series.runs.items()])


def record_repeats(series: Series) -> Repeats:
    """Write the results so far to ``repeats.json``; returns them.

    Raises:
        HpctrainError: a file of a run is damaged or missing, or the results cannot be written.
    """
    repeats = read_repeats(series)
    write_json(series.file, repeats.model_dump(mode="json"))
    return repeats


def _first(series: Series) -> tuple[Plan, Recipe]:
    file = series.runs[series.seeds[0]].plan
    plan = read_model(file, Plan)
    if plan.recipe is None:
        raise HpctrainError(
            "HT-series-no-recipe",
            "{path}: repeated runs are of a recipe",
            "the file is damaged: restore it, or run again",
            path=file,
        )
    return plan, plan.recipe


def _result(recipe: Recipe, seed: int, directory: RunDirectory) -> RepeatResult:
    if not directory.events.exists():
        return RepeatResult(seed=seed, status="not begun", value=None)
    summary = read_summary(directory)
    return RepeatResult(seed=seed, status=summary["status"], value=summary["metrics"].get(result_name(recipe)))


def table(repeats: Repeats) -> Table:
    """The table for a terminal."""
    from rich import box
    from rich.markup import escape
    from rich.table import Table

    title, caption = escape(f"{repeats.recipe}: {repeats.title}"), escape(repeats.reported_text)
    found = Table(title=title, caption=caption, box=box.SIMPLE_HEAD, min_width=72)
    for column in ("seed", "status", "result"):
        found.add_column(column, justify="right" if column == "result" else "left")
    for row in repeats.rows[:-1]:
        found.add_row(*row)
    found.add_section()
    found.add_row(*repeats.rows[-1])
    return found


def write_repeats_report(series: Series) -> Path:
    """Write ``report.html`` of a series, finished or not, and return its path.

    Raises:
        HpctrainError: a file of a run is damaged or missing, or the page cannot be written.
    """
    repeats = read_repeats(series)
    plan, _ = _first(series)
    tables = settings(plan)
    tables["Recipe"] = [row for row in tables["Recipe"] if row[0] != "seed"]
    page = template("repeats.html.jinja").render(repeats=repeats, settings=tables)
    file = RunDirectory(series.path).report
    write_whole(file, page.encode(), private=True, elsewhere="copy the directory to a place of your own")
    return file


def _figure(value: float | None) -> str:
    return "—" if value is None else f"{value:.4f}"
