"""Writes messages to stderr without ``print``.

Many scripts replace the built-in ``print`` by one that is silent on all ranks but one, or that adds the time. Python's
own ``traceback.print_exception`` calls it too.
"""

from __future__ import annotations

import contextlib
import sys
import traceback


def tell(text: object) -> None:
    """Write a line."""
    _write(f"{text}\n")


def tell_error(error: BaseException) -> None:
    """Write an error with its traceback."""
    _write("".join(traceback.format_exception(error)))


def _write(text: str) -> None:
    # A script may have set sys.stderr to None, as Python does where it has no stream.
    if stream := sys.stderr or sys.__stderr__:
        # A message that a full disk or a reader that has gone does not take must not end the program.
        with contextlib.suppress(OSError):
            stream.write(text)
            stream.flush()
