"""Groups of options: their place in the help, and their values in the command."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated

import pytest
import typer
from typer.testing import CliRunner

from hpctrain.cli.options import with_groups


@dataclass(frozen=True, kw_only=True)
class Car:
    wheels: Annotated[int, typer.Option(min=3)] = 4
    colours: Annotated[list[str] | None, typer.Option("--colour")] = None


@dataclass(frozen=True, kw_only=True)
class Van(Car):
    load: Annotated[float | None, typer.Option()] = None


seen: list[tuple[str, bool, Van]] = []


@with_groups
def drive(
    name: Annotated[str, typer.Argument()],
    fast: Annotated[bool, typer.Option("--fast")] = False,
    *,
    van: Van,
    dry_run: Annotated[bool, typer.Option("--dry-run")] = False,
) -> None:
    """Somewhere."""
    seen.append((name, fast or dry_run, van))


def invoke(*arguments: str) -> tuple[int, str]:
    app = typer.Typer(add_completion=False, rich_markup_mode=None)
    app.command()(drive)
    result = CliRunner().invoke(app, arguments)
    return result.exit_code, result.output


def test_a_command_gets_its_groups() -> None:
    seen.clear()
    assert invoke("bus")[0] == invoke("bus", "--load", "2", "--colour", "red", "--colour", "blue", "--dry-run")[0] == 0
    assert seen == [("bus", False, Van()), ("bus", True, Van(load=2.0, colours=["red", "blue"]))]


def test_the_order_in_the_help_is_that_of_the_command() -> None:
    code, said = invoke("--help")
    assert code == 0 and "Somewhere." in said
    assert re.findall(r"^ +--(\S+)", said, re.MULTILINE) == ["fast", "wheels", "colour", "load", "dry-run", "help"]


def test_two_groups_with_one_option_are_a_mistake() -> None:
    def twice(*, car: Car, van: Van) -> None: ...

    with pytest.raises(ValueError, match="'wheels'"):
        with_groups(twice)
