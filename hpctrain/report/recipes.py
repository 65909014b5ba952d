"""Tables of recipes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from hpctrain.common.recipes.schema import Recipe
from hpctrain.common.recipes.sections import Batch
from hpctrain.report.results import row_text

if TYPE_CHECKING:
    from rich.table import Table


def list_row(recipe: Recipe) -> dict[str, Any]:
    """The JSON of a recipe."""
    return {
        "name": recipe.name,
        "model": recipe.model.name,
        "data": recipe.data.name,
        "batch": recipe.batch.model_dump(mode="json", exclude_none=True),
        "epochs": recipe.epochs,
        "reported": [row.model_dump(mode="json") for row in recipe.reported],
        "cost": recipe.cost,
        "source": recipe.source,
    }


def list_table(recipes: Iterable[Recipe]) -> Table:
    """A table of recipes."""
    table = _table("name", "model", "batch", "epochs", "reported")
    for recipe in recipes:
        _add(table, recipe.name, recipe.model.name, batch_text(recipe.batch), str(recipe.epochs), _results(recipe))
    return table


def _table(*columns: str) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    for column in columns:
        table.add_column(column, no_wrap=True, justify="right" if column == "epochs" else "left")
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


def _results(recipe: Recipe) -> str:
    """The result reported for the recipe's batch if known, else the range of all: ``0.6604 to 0.7652 (10)``."""
    rows = recipe.reported
    if not rows:
        return ""
    if (size := recipe.batch.fixed_size) and (own := recipe.reported_at(size)):
        rows = tuple(row for row in rows if row.batch == own.batch)
    metric = rows[0].metric
    rows = tuple(row for row in rows if row.metric == metric)
    name = "" if metric == "test_accuracy" else f"{metric.replace('_', ' ')} "
    if len(rows) == 1:
        return name + row_text(rows[0].model_copy(update={"remark": ""}))
    values = [row.value for row in rows]
    return f"{name}{min(values):g} to {max(values):g} ({len(rows)})"
