"""Writes messages to stderr without ``print``.

Many scripts replace the built-in ``print`` by one that is silent on all ranks but one, or that adds the time. Python's
own ``traceback.print_exception`` calls it too.
"""

from __future__ import annotations

import sys
import traceback


def tell(text: object) -> None:
    """Write a line."""
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


def tell_error(error: BaseException) -> None:
    """Write an error with its traceback."""
    sys.stderr.write("".join(traceback.format_exception(error)))
    sys.stderr.flush()
