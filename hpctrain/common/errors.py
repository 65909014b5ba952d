"""The exceptions that users of hpctrain are meant to see."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence

# How many of the counted things a warning names.
_NAMED = 3


class HpctrainError(Exception):
    """A mistake that the user can correct, or a fault of the machine that they should know of.

    The command line prints ``message`` and ``hint`` without a traceback.

    Args:
        message: what was wrong and where (file and line, key, host).
        hint: the valid choices, or the command that corrects it.
        exit_code: 2 for wrong use, 1 for a run that failed, 3 for a check that found a fault.
    """

    def __init__(self, message: str, hint: str = "", *, exit_code: int = 2) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.exit_code = exit_code

    def __str__(self) -> str:
        return f"{self.message}\n  {self.hint}" if self.hint else self.message


class TransientError(HpctrainError):
    """A fault that another attempt will probably not see, such as flipped bits or lost ranks."""


def nearest(name: str, choices: Iterable[str]) -> str:
    """A sentence with the valid choices, beginning with the one that the user probably meant."""
    known = sorted(choices)
    close = difflib.get_close_matches(name, known, n=1)
    meant = f"did you mean {close[0]!r}? " if close else ""
    return f"{meant}valid: {', '.join(known)}"


def counted(what: str, names: Sequence[str]) -> str:
    """A warning about many things of one kind."""
    return f"{what} ({len(names)}): {some(names)}"


def some(names: Sequence[str]) -> str:
    """The first of many names, and the number of the others."""
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + more
