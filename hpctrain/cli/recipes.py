"""``hpctrain recipes``."""

from __future__ import annotations

import json
from typing import Annotated

import typer
import yaml

from hpctrain.recipes.entries import Listed, all_entries
from hpctrain.recipes.load import load_recipe

app = typer.Typer(add_completion=False, no_args_is_help=True)

Overrides = Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change a value; repeatable.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@app.command("list")
def list_recipes(as_json: AsJson = False) -> None:
    """The published recipes."""
    recipes = [entry for entry in all_entries() if not isinstance(entry, Listed)]
    if as_json:
        rows = [{"name": r.name, "model": r.model.name, "data": r.data.name, "source": r.source} for r in recipes]
        typer.echo(json.dumps(rows, indent=2))
        return
    for recipe in recipes:
        typer.echo(f"{recipe.name}  {recipe.model.name} on {recipe.data.name}, {recipe.epochs} epochs")


@app.command()
def show(
    name: Annotated[str, typer.Argument(metavar="NAME", help="A published recipe, or the path of a recipe file.")],
    overrides: Overrides = None,
    as_json: AsJson = False,
) -> None:
    """A recipe with every value, the defaults included."""
    values = load_recipe(name, overrides or []).model_dump(mode="json")
    typer.echo(json.dumps(values, indent=2) if as_json else yaml.safe_dump(values, sort_keys=False).rstrip())


@app.command()
def check(
    file: Annotated[str, typer.Argument(metavar="FILE", help="A recipe file, or a published recipe's name.")],
    as_json: AsJson = False,
) -> None:
    """Check a recipe against the schema; exits 2 and says what is wrong, and where, if it does not hold."""
    recipe = load_recipe(file)
    typer.echo(json.dumps({"name": recipe.name, "status": "ok"}) if as_json else f"{recipe.name}: ok")
