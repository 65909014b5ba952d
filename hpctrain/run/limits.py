"""How long ranks wait for each other, from the environment. For the launcher too, which waits for them to meet."""

from __future__ import annotations

import os

from hpctrain.errors import HpctrainError

DEFAULT_TIMEOUT = 600.0
DEFAULT_STALL = 60.0


def timeout_seconds() -> float:
    """How long a rank waits for the others, from ``HPCTRAIN_TIMEOUT``.

    Raises:
        HpctrainError: not a number above 0.
    """
    return _seconds("HPCTRAIN_TIMEOUT", DEFAULT_TIMEOUT)


def stall_seconds() -> float:
    """How long a rank waits before it names the ranks that it waits for, from ``HPCTRAIN_STALL``.

    At most half of ``HPCTRAIN_TIMEOUT``, so that whoever gives up knows for whom it waited.

    Raises:
        HpctrainError: not a number above 0.
    """
    return min(_seconds("HPCTRAIN_STALL", DEFAULT_STALL), timeout_seconds() / 2)


def _seconds(variable: str, default: float) -> float:
    text = os.environ.get(variable, str(default))
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not seconds > 0:
        raise HpctrainError(f"{variable}={text!r} is not a number of seconds above 0")
    return seconds
