"""How a rank waits for the others: every wait of every collective goes through here, and none is without end."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence

from hpctrain.errors import HpctrainError
from hpctrain.stopping import RESUMABLE

DEFAULT_TIMEOUT = 600.0
# The first polls spin, because most collectives end within microseconds; later ones leave the core to others.
_SPINS = 2000
_SLEEP_SECONDS = 20e-6
# From here on a wait is a long one: it need not be noticed at once when it ends.
_LONG_SECONDS = 0.01
_LONG_SLEEP_SECONDS = 0.0005


def timeout_seconds() -> float:
    """How long a rank waits for the others, from ``HPCTRAIN_TIMEOUT``."""
    text = os.environ.get("HPCTRAIN_TIMEOUT", str(DEFAULT_TIMEOUT))
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not seconds > 0:
        raise HpctrainError(f"HPCTRAIN_TIMEOUT={text!r} is not a number of seconds above 0")
    return seconds


class Patience:
    """Waits until something that other ranks do is done.

    Args:
        who: this rank and its host, for messages.
        check: raises where a rank is known to have died; called now and then while waiting.
    """

    def __init__(self, who: str, check: Callable[[], None] = lambda: None) -> None:
        self._who = who
        self._check = check
        self._timeout = timeout_seconds()

    def wait(self, done: Callable[[], bool], what: str, missing: Callable[[], Sequence[int]] = lambda: ()) -> None:
        """Poll ``done`` until it is true.

        Args:
            done: a look that costs little.
            what: is waited for, in words.
            missing: the ranks that are known not to have come yet, where that is known.

        Raises:
            RanksLostError: a rank died.
            HpctrainError: it is not done in time; exit code 4, because no rank has failed.
        """
        for _ in range(_SPINS):
            if done():
                return
        begin = time.monotonic()
        while not done():
            waited = time.monotonic() - begin
            self._check()
            if waited > self._timeout:
                ranks = ", ".join(map(str, missing())) or "the other ranks"
                raise HpctrainError(
                    f"{self._who} waited {self._timeout:g} s for {ranks} in {what}",
                    "look in logs/ for the rank that stopped earlier; HPCTRAIN_TIMEOUT=SECONDS sets the limit",
                    exit_code=RESUMABLE,
                )
            time.sleep(_SLEEP_SECONDS if waited < _LONG_SECONDS else _LONG_SLEEP_SECONDS)
