"""``hpctrain recipes``."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated, Any

import typer
import yaml

from hpctrain.cli.options import AsJson
from hpctrain.cli.work import print_notes
from hpctrain.common.errors import HpctrainError, joined
from hpctrain.common.recipes.entries import all_entries, load_entry, variant_names
from hpctrain.common.recipes.keys import used_values
from hpctrain.common.recipes.load import load_recipe
from hpctrain.common.recipes.schema import Recipe
from hpctrain.report.output import answer, answer_json, print_table, table, tell
from hpctrain.report.summary import row_text

if TYPE_CHECKING:
    from rich.table import Table

app = typer.Typer(add_completion=False, no_args_is_help=True)

Overrides = Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change a value; repeatable.")]


@app.command("list")
def list_recipes(as_json: AsJson = False) -> None:
    """List the published recipes with their variants."""
    if as_json:
        answer_json([list_row(recipe) for recipe in all_entries()])
    else:
        print_table(list_table(all_entries()))


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
    """A table of recipes. Values are cut to one line, but never a name, because people type it."""
    rows = []
    for recipe in recipes:
        batch = recipe.batch
        size = f"{batch.per_rank} a rank" if batch.fixed_size is None else str(batch.fixed_size)
        rows.append((recipe.name, recipe.model.name, size, str(recipe.epochs), _results(recipe)))
    columns = ("name", "model", "batch", "epochs", "reported")
    return table(columns, rows, left={*columns} - {"epochs"}, folded=("name",))


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


@app.command()
def show(
    name: Annotated[
        str,
        typer.Argument(help="A published recipe, or the path of a recipe file."),
    ],
    overrides: Overrides = None,
    world: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, help="Also show batch, rate and momentum of a run on N ranks by epoch."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show a recipe with every value that it uses, including defaults; with --json, every value that there is."""
    if overrides or world:
        _show_run(print_notes(load_recipe(name, overrides or [])), world, as_json=as_json)
    else:
        _show_values(load_entry(name), as_json=as_json)
        if variants := variant_names(name):
            named = ", ".join(f"{name}@{variant}" for variant in variants)
            tell(f"hpctrain: the first of its variants: {named}")


@app.command()
def check(
    file: Annotated[
        str,
        typer.Argument(metavar="FILE", help="A recipe file, or a published recipe's name."),
    ],
    as_json: AsJson = False,
) -> None:
    """Check a recipe in all of its variants; exits 2 and says what is wrong, and where, if one is invalid."""
    rows: list[dict[str, Any]] = []
    # A fault that all variants share is told once.
    different: dict[str, HpctrainError] = {}
    for name in [f"{file}@{variant}" for variant in variant_names(file)] or [file]:
        try:
            rows.append({"name": load_entry(name).name, "status": "ok"})
        except HpctrainError as error:
            rows.append({"name": name, "status": "failed", "error": error.record()})
            different[error.message] = error
    if as_json:
        answer_json(rows)
        raise typer.Exit(2 if different else 0)
    answer("\n".join(f"{row['name']}: {row['status']}" for row in rows))
    if different:
        raise joined([*different.values()], next(iter(different.values())).hint)


@app.command()
def schema() -> None:
    """Print the JSON schema of recipe files, with which editors complete and check keys."""
    found = Recipe.model_json_schema()
    changes = {"type": "object", "description": "by name, the keys that each variant changes"}
    answer_json({**found, "properties": {**found["properties"], "variants": changes}})


def _show_values(entry: Recipe, *, as_json: bool) -> None:
    if as_json:
        answer_json(entry.model_dump(mode="json"))
    else:
        answer(yaml.safe_dump(used_values(entry), sort_keys=False, allow_unicode=True).rstrip())


def _show_run(recipe: Recipe, world: int | None, *, as_json: bool) -> None:
    from hpctrain.report.recipe_schedule import at_world, schedule, schedule_table

    # Everything is checked before anything is printed.
    found = schedule(at_world(recipe, world)) if world else {}
    if not (as_json and world):
        _show_values(recipe, as_json=as_json)
    if world and as_json:
        answer_json(found)
    elif world:
        print_table(schedule_table(found))
