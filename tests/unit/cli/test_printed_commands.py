"""Every ``hpctrain`` command line in the README and on the pages is one that the real command takes."""

from __future__ import annotations

from typing import Any

import pytest
import typer

from hpctrain.cli.main import app
from hpctrain.common.cluster.backends import BACKENDS
from hpctrain.common.errors import HpctrainError
from hpctrain.common.recipes.load import load_recipe, mesh_overrides
from hpctrain.common.recipes.mesh import parse_mesh
from hpctrain.common.recipes.tracking import parse_trackers
from support.pages import PrintedCommand, commands, options

# Options of mpirun, srun, sbatch and ibnetdiscover.
OTHERS = {"--cpu-bind", "--no-kill", "--with-ft", "-p"}

# The parser's own base of them all; a missing argument is one of them.
_UsageError = typer.BadParameter.__mro__[1]


def parse(command: PrintedCommand) -> None:
    """Find the command, and have it check its options, choices and arguments; nothing is executed."""
    parser = typer.main.get_command(app)
    context = typer.Context(parser, info_name="hpctrain")
    words = list(command.words)
    while hasattr(parser, "resolve_command") and words:
        if words[0].startswith("-"):
            break
        name, parser, words = parser.resolve_command(context, words)
        assert parser is not None
        context = typer.Context(parser, info_name=name, parent=context)
    if not words and hasattr(parser, "resolve_command"):
        assert not command.whole, "a group of commands by itself only prints its help"
        return
    try:
        check_values(parser.make_context(context.info_name, words, parent=context.parent).params)
    except typer.Exit:
        # An option that prints something and ends.
        pass
    except _UsageError as error:
        if command.whole or type(error).__name__ != "MissingParameter":
            raise


def check_values(given: dict[str, Any]) -> None:
    """What the parser passes on as text: names of recipes, their keys and values, and backends."""
    recipe = given.get("work") or given.get("recipe")
    # What a prediction searches for.
    mesh = given.get("mesh") if given.get("mesh") != "auto" else None
    # A name, not a file of the reader's; and values, not a variable of a loop.
    if recipe and not recipe.endswith((".py", ".yaml", ".json")):
        changes = [change for change in given.get("overrides") or () if "$" not in change]
        load_recipe(recipe, [*changes, *mesh_overrides(mesh)])
    elif mesh:
        for each in [mesh] if isinstance(mesh, str) else mesh:
            parse_mesh(each)
    if (tracking := given.get("tracking")) is not None:
        parse_trackers(tracking)
    if given.get("backend") not in (None, *BACKENDS):
        raise HpctrainError("HT-of-test", "unknown backend", f"valid: {', '.join(BACKENDS)}")


@pytest.mark.parametrize("command", commands(), ids=str)
def test_a_printed_command_is_one(command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    parse(command)


def known_options() -> set[str]:
    group = typer.main.get_command(app)
    context = typer.Context(group, info_name="hpctrain")
    parsers = [group, *(group.resolve_command(context, [name])[1] for name in group.list_commands(context))]
    for parser in parsers:
        # A group's own commands come behind it in the list, and are looked at as it is.
        parsers += getattr(parser, "commands", {}).values()
    return {name for parser in parsers for each in parser.params for name in (*each.opts, *each.secondary_opts)}


def test_options_within_sentences_exist():
    known = known_options() | OTHERS
    assert [(page, option) for page, option in options() if option not in known] == []
    assert len(options()) > 30
