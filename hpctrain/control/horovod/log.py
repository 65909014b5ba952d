"""Reads a compiler's output: the progress, and the first error."""

from __future__ import annotations

import re
from collections.abc import Iterable

_PERCENT = re.compile(r"\s*\[ *(?P<percent>\d+)%\]")
_COUNT = re.compile(r"\s*\[(?P<done>\d+)/(?P<all>[1-9]\d*)\]")
_ERROR = re.compile(
    r"""
      (:\ |^)(fatal\ )?error:\            # C++ compiler
    | ^nvcc\ fatal
    | ^CMake\ Error
    | undefined\ reference\ to
    | (^|/)ld:\ (cannot|error)
    | No\ rule\ to\ make\ target
    | ^[A-Za-z.]*(Error|Exception):\      # Python, in setup.py
    | command\ not\ found
    """,
    re.VERBOSE,
)
_MOST_LINES = 5


def percent_done(line: str) -> int | None:
    """The percentage in a line of make (``[ 42%]``) or ninja (``[3/7]``); None for any other line."""
    if match := _PERCENT.match(line):
        return int(match["percent"])
    if match := _COUNT.match(line):
        return 100 * int(match["done"]) // int(match["all"])
    return None


def first_error(lines: Iterable[str]) -> str:
    """The first error and the indented lines that explain it; the last lines where none is recognised."""
    # pip indents what its subprocess prints by two spaces.
    text = [line.rstrip().removeprefix("  ") for line in lines]
    start = next((number for number, line in enumerate(text) if _ERROR.search(line)), None)
    if start is None:
        return "\n".join([line for line in text if line][-_MOST_LINES:])
    found = [text[start]]
    for line in text[start + 1 : start + _MOST_LINES]:
        if line and not line.startswith(" "):
            break
        found.append(line)
    return "\n".join(line for line in found if line)
