"""How a command answers on stdout: a table, or JSON."""

from __future__ import annotations

import os
import shutil
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from hpctrain.report.output import terminal

if TYPE_CHECKING:
    from rich.console import RenderableType

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]

# Columns; no line of a table is longer.
_UNBOUNDED = 1000


def table_width() -> int | None:
    """The columns of the terminal. None in a pipe or a file, where nothing is cut, unless COLUMNS sets the width."""
    bounded = sys.stdout.isatty() or "COLUMNS" in os.environ
    return shutil.get_terminal_size().columns if bounded else None


def print_table(table: RenderableType, *, stderr: bool = False) -> None:
    """Print a table as wide as the terminal, as the answer or beside it on stderr."""
    terminal(width=None if table_width() else _UNBOUNDED, stderr=stderr).print(table)
