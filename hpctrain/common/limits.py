"""How long ranks wait for each other, and how many do what, from the environment. For the launcher too."""

from __future__ import annotations

import os

from hpctrain.common.errors import HpctrainError

DEFAULT_TIMEOUT = 600.0
DEFAULT_STALL = 60.0
_DEFAULT_OBJECT_TIMEOUT = 30.0
# How many replicas a process of the backend mirrored has; the launcher sets it.
REPLICAS = "HPCTRAIN_REPLICAS"
# How many ranks of the backend parameter_server keep the parameters.
PARAMETER_SERVERS = "HPCTRAIN_PARAMETER_SERVERS"


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


def object_timeout_seconds() -> float:
    """How long a server of objects may be silent, from ``HPCTRAIN_OBJECT_TIMEOUT``.

    Raises:
        HpctrainError: not a number above 0.
    """
    return _seconds("HPCTRAIN_OBJECT_TIMEOUT", _DEFAULT_OBJECT_TIMEOUT)


def _seconds(variable: str, default: float) -> float:
    text = os.environ.get(variable, str(default))
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not seconds > 0:
        raise HpctrainError(f"{variable}={text!r} is not a number of seconds above 0")
    return seconds


def parameter_servers() -> int:
    """How many ranks keep the parameters, from ``HPCTRAIN_PARAMETER_SERVERS``; by default one.

    Raises:
        HpctrainError: not a whole number above 0.
    """
    text = os.environ.get(PARAMETER_SERVERS, "1")
    if not (text.isascii() and text.isdigit() and int(text)):
        raise HpctrainError(f"{PARAMETER_SERVERS}={text!r} is not a number of ranks above 0")
    return int(text)
