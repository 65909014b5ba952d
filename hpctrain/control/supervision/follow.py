"""Follows the events and rank 0's log while a run writes them.

A run must not end because its files cannot be followed: what cannot be read now is read later, a line that is no event
is skipped, and either gives one warning.
"""

from __future__ import annotations

import codecs
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from hpctrain.common.errors import HpctrainError
from hpctrain.common.files.regular import open_regular
from hpctrain.common.run.directory import RunDirectory
from hpctrain.common.run.events import parse_event
from hpctrain.common.run.events.reader import LONGEST_LINE
from hpctrain.control.supervision.audience import Audience

# The most that one look passes on, for a log that grows faster.
_LOOK_BYTES = 2**22
# After the last write, a file server that has just failed is tried again this often.
_LAST_TRIES = 10
_PAUSE_SECONDS = 0.2

_New = TypeVar("_New", bytes, list[bytes])


class Tail:
    """What is added to a growing file, each part returned once. The file need not exist yet.

    A file that has become shorter than what was returned of it is read from its beginning.

    Args:
        whole: also return what it already has.
    """

    def __init__(self, path: Path, *, whole: bool = False) -> None:
        self.path = path
        # Ends behind the last complete line, because the next attempt may remove an incomplete one.
        self.offset = path.stat().st_size if not whole and path.exists() else 0

    def lines(self) -> list[bytes]:
        """The next complete lines, about as long together as one event may be; none where there is no more.

        A line that is too long for an event comes in parts.

        Raises:
            OSError: the file cannot be read; the next call returns what this one would have.
        """
        text = self._read(LONGEST_LINE + 1)
        end = text.rfind(b"\n") + 1
        if len(text) - end > LONGEST_LINE:
            end = len(text)
        self.offset += end
        return text[:end].splitlines()

    def text(self, *, at_most: int) -> bytes:
        """What was written since the last call, whether or not its last line is complete.

        Raises:
            OSError: as :meth:`lines`.
        """
        text = self._read(at_most)
        self.offset += len(text)
        return text

    def _read(self, at_most: int) -> bytes:
        try:
            file = open_regular(self.path, links=False)
        except FileNotFoundError:
            return b""
        with file:
            if os.fstat(file.fileno()).st_size < self.offset:
                self.offset = 0
            file.seek(self.offset)
            return file.read(at_most)


class Follower:
    """Passes on a run's events and rank 0's output as they appear, without those of earlier attempts.

    What could not be read is a notice, once for each file.
    """

    def __init__(self, directory: RunDirectory, audience: Audience) -> None:
        self._events = Tail(directory.events)
        self._log = Tail(directory.log(0))
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._directory = directory
        self._audience = audience
        self._said: set[object] = set()

    def advance(self, *, last: bool = False) -> None:
        """Pass on what is new; ``last`` says that no more will be written."""
        while text := self._read(self._directory.log(0), lambda: self._log.text(at_most=_LOOK_BYTES), patient=last):
            self._audience.output(self._decoder.decode(text))
            if not last:
                break
        # The last line is read only when complete: a crash can cut an event short.
        while lines := self._read(self._directory.events, self._events.lines, patient=last):
            for line in lines:
                self._pass_on(line)
            if not last:
                break

    def _pass_on(self, line: bytes) -> None:
        try:
            event = parse_event(line, str(self._directory.events))
        except HpctrainError as error:
            self._say_once("an event", f"{error.message}; it is passed over")
        else:
            self._audience.show(event)

    def _read(self, path: Path, read: Callable[[], _New], *, patient: bool) -> _New | None:
        tries = _LAST_TRIES if patient else 1
        for number in range(tries):
            if number:
                time.sleep(_PAUSE_SECONDS)
            try:
                return read()
            except OSError as error:
                self._say_once(path, f"cannot read {path}: {error.strerror}; the run goes on")
        return None

    def _say_once(self, subject: object, problem: str) -> None:
        if subject not in self._said:
            self._said.add(subject)
            self._audience.notice(f"warning: {problem}")
