"""Recipes in tables: all of them, and what sets two apart."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from hpctrain.recipes.entries import Listed
from hpctrain.recipes.schema import Batch, Recipe, Reported
from hpctrain.report.results import row_text

if TYPE_CHECKING:
    from rich.table import Table


def list_row(entry: Recipe | Listed) -> dict[str, Any]:
    """What programs get of a recipe; ``missing`` is why it cannot be run, empty for one that can."""
    known: dict[str, Any] = {"model": None, "data": None, "batch": None, "epochs": None, "missing": []}
    if isinstance(entry, Recipe):
        batch = entry.batch.model_dump(mode="json", exclude_none=True)
        known |= {"model": entry.model.name, "data": entry.data.name, "batch": batch, "epochs": entry.epochs}
    else:
        known["missing"] = list(entry.missing)
    reported = [row.model_dump(mode="json") for row in entry.reported]
    return {"name": entry.name, **known, "reported": reported, "cost": entry.cost, "source": entry.source}


def list_tables(entries: Iterable[Recipe | Listed]) -> Iterator[Table]:
    """Those that can be run, one a row, then those that cannot, with what is missing."""
    entries = list(entries)
    runnable = _table("model", "data", "batch", "epochs")
    cost = ""
    for recipe in (entry for entry in entries if isinstance(entry, Recipe)):
        values = (recipe.model.name, recipe.data.name, batch_text(recipe.batch), str(recipe.epochs))
        # That of several variants is said once.
        _add(runnable, recipe, *values, cost="" if recipe.cost == cost else recipe.cost)
        cost = recipe.cost
    yield runnable
    if listed := [entry for entry in entries if isinstance(entry, Listed)]:
        others = _table("cannot be run: missing", no_wrap=False)
        for entry in listed:
            _add(others, entry, "\n".join(f"- {text}" for text in entry.missing), cost=entry.cost)
        yield others


def _table(*columns: str, no_wrap: bool = True) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    table.add_column("name", no_wrap=True)
    for column in columns:
        table.add_column(column, no_wrap=no_wrap, justify="right" if column == "epochs" else "left")
    table.add_column("reported", no_wrap=True)
    table.add_column("cost")
    return table


def _add(table: Table, entry: Recipe | Listed, *values: str, cost: str) -> None:
    from rich.text import Text

    table.add_row(*map(Text, (entry.name, *values, _result(entry), cost)))


def batch_text(batch: Batch) -> str:
    """``8192``, ``32 a rank`` or ``8192 = 32 x 256``."""
    if batch.per_rank is None:
        return str(batch.size)
    if batch.emulated_ranks is None:
        return f"{batch.per_rank} a rank"
    return f"{batch.per_rank * batch.emulated_ranks} = {batch.per_rank} x {batch.emulated_ranks}"


def _result(entry: Recipe | Listed) -> str:
    """What is reported for the recipe's own batch where that is known, else the first row of all."""
    rows = entry.reported
    if isinstance(entry, Recipe) and (size := fixed_size(entry.batch)) and (own := entry.reported_at(size)):
        rows = (own,)
    return _row(rows[0]) + (f" and {len(rows) - 1} more" if len(rows) > 1 else "")


def fixed_size(batch: Batch) -> int | None:
    """Samples of one step over all ranks; None where that depends on their number."""
    return batch.at(1).size if batch.size or batch.emulated_ranks else None


def _row(row: Reported) -> str:
    metric = "" if row.metric == "test_accuracy" else f"{row.metric.replace('_', ' ')} "
    return metric + row_text(row.model_copy(update={"remark": ""})) + (f" at {row.batch}" if row.batch else "")


def difference_table(one: Recipe, other: Recipe, found: Mapping[str, tuple[Any, Any]]) -> Table:
    """Of :func:`hpctrain.recipes.difference.differences`."""
    from rich import box
    from rich.markup import escape
    from rich.table import Table
    from rich.text import Text

    table = Table("", escape(one.name), escape(other.name), box=box.SIMPLE_HEAD, pad_edge=False)
    for key, values in found.items():
        table.add_row(key, *(Text("—" if value is None else str(value)) for value in values))
    return table
