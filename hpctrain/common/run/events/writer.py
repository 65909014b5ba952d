"""Writes events so that a crash loses none that was emitted."""

from __future__ import annotations

import contextlib
import os
from collections import deque
from collections.abc import Sequence
from io import FileIO
from pathlib import Path
from typing import Any, Self

from hpctrain.common.files.disk import disk_error
from hpctrain.common.files.regular import open_regular, private
from hpctrain.common.run.events.kinds import CheckpointEvent, Event, LogEvent, OtherEvent, StepEvent
from hpctrain.common.run.events.reader import LONGEST_LINE, EventsFile, attempts, intact_length, line_of

# How far ranks can be ahead of the one that writes, and more: it takes part in each step.
_RECENT = 16


class EventWriter:
    """Appends events to a file; each line is written whole before ``emit`` returns, even if the process then dies.

    A line survives a crash of the machine from the next :meth:`synchronise` on.

    Args:
        path: the file, or None to write nothing as long as another process does, which emits the same events: ranks
            other than 0 until :meth:`take_over`.
        alone: nobody else writes just now, so that a partial last line is what a crash left, and is cut off.
    """

    def __init__(self, path: Path | None, *, alone: bool = True) -> None:
        self._file: FileIO | None = None
        self._recent: deque[Event] = deque(maxlen=_RECENT)
        self._there: set[tuple[Any, ...]] = set()
        if path:
            self._open(path, alone=alone)

    def _open(self, path: Path, *, alone: bool) -> None:
        self._path = path
        try:
            if alone and path.exists():
                _drop_partial_line(path)
            # A line is one write of an unbuffered file, so a reader sees a line whole or not at all.
            self._file = open(path, "ab", buffering=0, opener=private)  # noqa: SIM115 - __exit__ closes it
        except OSError as error:
            raise disk_error(error, path) from error

    def take_over(self, path: Path) -> None:
        """Continue for a process that died: write the newest events that it had not written, and all later ones."""
        if self._file:
            return
        self._open(path, alone=True)
        events = EventsFile(path)
        recorded: list[Sequence[Event]] = [events.newest(StepEvent), events.newest(LogEvent)]
        recorded += attempts(events.outline)[-1:]
        # Events of unknown kinds cannot be compared, and this version emits none of them.
        self._there = {_identity(event) for part in recorded for event in part if not isinstance(event, OtherEvent)}
        while self._recent:
            self._write(self._recent.popleft())

    def tells_of_checkpoint(self, iteration: int) -> bool:
        """Whether the file contains the event of that checkpoint."""
        if self._file is None:
            return False
        return any(event.iteration == iteration for event in EventsFile(self._path).few(CheckpointEvent))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        if self._file:
            self._file.close()

    def emit(self, event: Event) -> None:
        """Append one event."""
        if self._file is None:
            self._recent.append(event)
        else:
            self._write(event)

    def synchronise(self) -> None:
        """Return when everything emitted is on disk. Any thread may call it."""
        if self._file is None:
            return
        try:
            os.fsync(self._file.fileno())
        except OSError as error:
            raise disk_error(error, self._path) from error

    def _write(self, event: Event) -> None:
        if _identity(event) in self._there:
            return
        assert self._file is not None
        line, written = line_of(event), 0
        try:
            while written < len(line):
                written += self._file.write(line[written:])
        except OSError as error:
            if written:
                # A disk that fills up takes a part of it, to which the next line must not be glued.
                with contextlib.suppress(OSError):
                    self._file.truncate(self._file.tell() - written)
            raise disk_error(error, self._path) from error


def _identity(event: Event) -> tuple[Any, ...]:
    """What an event of an attempt is known by, on every rank that would emit it: a measurement differs by rank."""
    names = tuple(event.values) if isinstance(event, LogEvent) else ()
    return (*(getattr(event, key, None) for key in ("event", "iteration", "epoch", "rank")), names)


def _drop_partial_line(path: Path) -> None:
    """A crash in the middle of a line leaves a part of it, which the next line must not be glued to."""
    with open_regular(path, links=False) as file:
        end = file.seek(0, os.SEEK_END)
        begin = file.seek(max(0, end - 2 * LONGEST_LINE))
        text = file.read(end - begin)
    whole = intact_length(text)
    # What is longer than any line is left to the reader, which refuses it.
    if whole < len(text) and (whole or not begin):
        with open(path, "r+b", opener=private) as writable:
            writable.truncate(begin + whole)
