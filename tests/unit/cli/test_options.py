"""Each command's arguments and options, as stored: a new one, or one that goes, is a decision and not an accident."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from hpctrain.cli.main import app

GOLDEN = Path(__file__).parents[2] / "golden" / "options.txt"


def parameters(command: Any, name: str, parent: Any = None) -> Iterator[str]:
    context = typer.Context(command, info_name=name, parent=parent)
    for each in command.list_commands(context) if hasattr(command, "list_commands") else ():
        yield from parameters(command.resolve_command(context, [each])[1], f"{name} {each}", context)
    yield from (f"{name}: {' '.join([*each.opts, *each.secondary_opts])}" for each in command.params)


@pytest.mark.slow
def test_options_are_those_that_were_decided_on() -> None:
    found = sorted(parameters(typer.main.get_command(app), "hpctrain"))
    if os.environ.get("REGENERATE"):
        GOLDEN.write_text("".join(f"{line}\n" for line in found))
    stored = GOLDEN.read_text().splitlines()
    assert found == stored, (
        f"if the change is meant: REGENERATE=1 python -m pytest {__file__}, and CHANGELOG.md says it"
    )
