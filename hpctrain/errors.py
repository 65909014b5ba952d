"""The one exception that a user of hpctrain is meant to see."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


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
    """A fault that another attempt may well not see: flipped bits, ranks that were lost."""


def nearest(name: str, choices: Iterable[str]) -> str:
    """The sentence that tells the valid choices, the one the user probably meant first."""
    known = sorted(choices)
    close = difflib.get_close_matches(name, known, n=1)
    meant = f"did you mean {close[0]!r}? " if close else ""
    return f"{meant}valid: {', '.join(known)}"
