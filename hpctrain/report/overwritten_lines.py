"""Makes lines of what a rank prints, which may be a progress bar: a line that is written again and again."""

from __future__ import annotations

import time
from collections.abc import Callable

# How often a bar's line is repeated where it cannot be drawn over.
_SECONDS = 1.0
# What shows nothing, with the backspaces by which Keras goes back.
_BLANK = "\b \t"


class Lines:
    """Makes lines of text that comes in pieces.

    Of a line that carriage returns overwrite there remains what a terminal would show at its end. While it is still
    overwritten, its newest state is returned about once a second.

    Args:
        longest: characters; a longer line is returned in parts, so that output without line breaks does not fill the
            memory.
        clock: seconds that never go back.
    """

    def __init__(self, *, longest: int = 2**20, clock: Callable[[], float] = time.monotonic) -> None:
        self._longest = longest
        self._clock = clock
        self._open = ""
        self._returned = float("-inf")

    def add(self, text: str) -> list[str]:
        """The lines that ``text`` completes."""
        *complete, self._open = (self._open + text).split("\n")
        lines = [_shown(line) for line in complete]
        if "\r" in self._open:
            states, now = self._open.split("\r"), self._clock()
            # The last state may be incomplete, unless it is followed by a return as Keras writes it.
            newest = next((state for state in reversed(states[:-1]) if state.strip(_BLANK)), "")
            if newest and now - self._returned >= _SECONDS:
                self._returned = now
                lines.append(_shown(newest))
            # One state is kept, which is the line if only a line break follows.
            self._open = f"{newest[: self._longest]}\r{states[-1][: self._longest]}"
        elif len(self._open) > self._longest:
            lines.append(self._open)
            self._open = ""
        return lines

    def rest(self) -> list[str]:
        """The line that has no end, once no more text comes."""
        line, self._open = _shown(self._open), ""
        return [line] if line else []


def _shown(line: str) -> str:
    """What a terminal shows of a line, without what was overwritten."""
    states = [state.strip("\b") for state in line.split("\r")]
    return next((state for state in reversed(states) if state.strip(_BLANK)), "")
