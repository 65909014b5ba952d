"""Follows the events and rank 0's log while a run writes them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from hpctrain.run.directory import RunDirectory
from hpctrain.run.events import Event, parse_event


class Tail:
    """The lines of a growing file, each returned once. The file need not exist yet.

    Args:
        path: of the file.
        whole: with the lines that it has already.
    """

    def __init__(self, path: Path, *, whole: bool = False) -> None:
        self._path = path
        self._offset = path.stat().st_size if path.exists() and not whole else 0

    def lines(self, *, last: bool = False) -> list[bytes]:
        """The complete lines since the last call; with ``last`` also an incomplete one."""
        if not self._path.exists():
            return []
        with self._path.open("rb") as file:
            file.seek(self._offset)
            text = file.read()
        if not last:
            text = text[: text.rfind(b"\n") + 1]
        self._offset += len(text)
        return text.splitlines()


class Follower:
    """Passes on a run's events and rank 0's lines as they appear, without those of earlier attempts.

    Args:
        directory: the run.
        show: gets each event.
        line: gets each line that rank 0 printed.
    """

    def __init__(self, directory: RunDirectory, show: Callable[[Event], None], line: Callable[[str], None]) -> None:
        self._events = Tail(directory.events)
        self._log = Tail(directory.log(0))
        self._path = directory.events
        # Of the last event that was read, or left out, from 1; for errors.
        self._number = self._path.read_bytes().count(b"\n") if self._path.exists() else 0
        self._show = show
        self._line = line

    def advance(self, *, last: bool = False) -> None:
        """Pass on what is new; ``last`` says that nobody writes any more."""
        for line in self._log.lines(last=last):
            self._line(line.decode(errors="replace"))
        # A crash can cut the last event short; it is then no event.
        for line in self._events.lines():
            self._number += 1
            self._show(parse_event(line, f"{self._path}:{self._number}"))
