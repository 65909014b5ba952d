"""Prints output: nothing in it controls the terminal, and a reader who stops early does no harm.

Also writes the file that a command makes besides.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from hpctrain.common.files.disk import disk_error
from hpctrain.common.files.printable import json_text, printable

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

# Columns; no line of a table is longer.
_UNBOUNDED = 1000
_ELSEWHERE = "choose another place for it"


def answer(text: object, *, end: str = "\n") -> None:
    """Print an answer of a command, on stdout."""
    print(printable(str(text)), end=end, flush=True)


def answer_json(value: Any) -> None:
    """Print an answer of a command for programs, as :func:`hpctrain.common.files.printable.json_text` writes it."""
    answer(json_text(value, indent=2))


def tell(text: object) -> None:
    """Print a command's messages, on stderr."""
    say(str(text), sys.stderr)


def say(text: str, stream: TextIO) -> None:
    """Print a line. The run does not end if the reader has gone."""
    print(printable(text), file=Patient(stream), flush=True)


def duration(seconds: float | None) -> str | None:
    """A duration in its two largest units; None for None."""
    if seconds is None:
        return None
    if seconds < 60:
        return f"{seconds:.3g} s"
    minutes = round(seconds / 60)
    if minutes < 60:
        return f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    return f"{days} d {hours} h" if days else f"{hours} h {minutes} min"


def table_width() -> int | None:
    """The columns of the terminal. None in a pipe or a file, where nothing is cut, unless COLUMNS sets the width."""
    bounded = sys.stdout.isatty() or "COLUMNS" in os.environ
    return shutil.get_terminal_size().columns if bounded else None


def table(
    columns: Iterable[str],
    rows: Iterable[Iterable[str]],
    *,
    title: str = "",
    caption: str | None = None,
    left: Collection[str] = (),
    folded: Collection[str] = (),
    gap: int = 2,
) -> Table:
    """A table of texts, none of which controls the terminal.

    Args:
        left: the columns that are aligned to the left; all others are to the right.
        folded: those that a narrow terminal folds; it cuts all others.
    """
    from rich import box
    from rich.table import Table
    from rich.text import Text

    shown = Text(printable(title))
    made = Table(title=shown, caption=caption, box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, gap - 1, 0, 0))
    for column in columns:
        folds = column in folded
        made.add_column(
            column,
            justify="left" if column in left else "right",
            no_wrap=not folds,
            overflow="fold" if folds else "ellipsis",
        )
    for row in rows:
        made.add_row(*(Text(printable(cell)) for cell in row))
    return made


def print_table(table: RenderableType) -> None:
    """Print a table as wide as the terminal."""
    # Rich takes a tenth of a second to import, which most commands do not need.
    from rich.console import Console

    Console(width=None if table_width() else _UNBOUNDED).print(table)


def save(file: Path, content: str) -> None:
    """Write the file, and print its path."""
    try:
        file.write_bytes(content.encode())
    except OSError as error:
        raise disk_error(error, file, _ELSEWHERE) from error
    tell(f"wrote {file}")


class Patient:
    """A stream that accepts everything, even if its reader (``| head``) or its terminal has gone.

    The run goes on then, because the files in its directory are still wanted.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        with self._given_up():
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with self._given_up():
            self._stream.flush()

    @contextlib.contextmanager
    def _given_up(self) -> Iterator[None]:
        try:
            yield
        except OSError:
            # The null device also takes what is still in the buffer, and what others write to this descriptor.
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self._stream.fileno())
            os.close(nowhere)
