"""Tables of recipes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from hpctrain.common.recipes.entries import Listed
from hpctrain.common.recipes.schema import Recipe
from hpctrain.common.recipes.sections import Batch
from hpctrain.report.results import row_text

if TYPE_CHECKING:
    from rich.table import Table


def list_row(entry: Recipe | Listed) -> dict[str, Any]:
    """The JSON of a recipe; ``missing`` says why it cannot be run, and is empty if it can."""
    known: dict[str, Any] = {"model": None, "data": None, "batch": None, "epochs": None, "missing": []}
    if isinstance(entry, Recipe):
        batch = entry.batch.model_dump(mode="json", exclude_none=True)
        known |= {"model": entry.model.name, "data": entry.data.name, "batch": batch, "epochs": entry.epochs}
    else:
        known["missing"] = list(entry.missing)
    reported = [row.model_dump(mode="json") for row in entry.reported]
    return {"name": entry.name, **known, "reported": reported, "cost": entry.cost, "source": entry.source}


def list_tables(entries: Iterable[Recipe | Listed]) -> Iterator[Table]:
    """Tables of the recipes that can be run, and of the others with the first thing that is missing."""
    entries = list(entries)
    runnable = _table("name", "model", "batch", "epochs", "reported")
    for recipe in (entry for entry in entries if isinstance(entry, Recipe)):
        _add(runnable, recipe.name, recipe.model.name, batch_text(recipe.batch), str(recipe.epochs), _results(recipe))
    yield runnable
    if listed := [entry for entry in entries if isinstance(entry, Listed)]:
        others = _table("name", "reported", "cannot be run: missing", "")
        for entry in listed:
            more = f"+ {len(entry.missing) - 1} more" if len(entry.missing) > 1 else ""
            _add(others, entry.name, _results(entry), entry.missing[0], more)
        yield others


def _table(*columns: str) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    for column in columns:
        # "missing" holds sentences, which alone wrap where a terminal is narrow.
        table.add_column(column, no_wrap="missing" not in column, justify="right" if column == "epochs" else "left")
    return table


def _add(table: Table, *values: str) -> None:
    from rich.text import Text

    # Values are cut to one line, but never a name, because people type it.
    name, *others = values
    table.add_row(
        Text(name, no_wrap=False, overflow="fold"),
        *(Text(value, no_wrap=True, overflow="ellipsis") for value in others),
    )


def batch_text(batch: Batch) -> str:
    """A batch as ``8192``, or ``32 a rank``."""
    return f"{batch.per_rank} a rank" if batch.fixed_size is None else str(batch.fixed_size)


def _results(entry: Recipe | Listed) -> str:
    """The result reported for the recipe's batch if known, else the range of all: ``0.6604 to 0.7652 (10)``."""
    rows = entry.reported
    if not rows:
        return ""
    if isinstance(entry, Recipe) and (size := entry.batch.fixed_size) and (own := entry.reported_at(size)):
        rows = tuple(row for row in rows if row.batch == own.batch)
    metric = rows[0].metric
    rows = tuple(row for row in rows if row.metric == metric)
    name = "" if metric == "test_accuracy" else f"{metric.replace('_', ' ')} "
    if len(rows) == 1:
        return name + row_text(rows[0].model_copy(update={"remark": ""}))
    values = [row.value for row in rows]
    return f"{name}{min(values):g} to {max(values):g} ({len(rows)})"
