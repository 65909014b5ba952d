"""Marks in rank 0's log by which a reader tells what the rank wrote to stderr from what it wrote to stdout.

Both streams are the one file, so that their order is kept, and it needs no reader while it is written. The marks are
two control characters each, which terminals pass over. What other programs, and libraries in C, write to stderr has
none.
"""

from __future__ import annotations

import codecs
import io
import os
import re
import sys
from collections.abc import Iterator

_BEGIN, _END = b"\x1f\x02", b"\x1f\x03"
_MARK = re.compile(rb"\x1f[\x02\x03]")


def without_marks(line: str) -> str:
    """A line of a log as it was printed."""
    return re.sub(_MARK.pattern.decode(), "", line)


class Streams:
    """Divides a log that is read in pieces into text of stdout and of stderr."""

    def __init__(self) -> None:
        self._is_stderr = False
        # The first byte of a mark whose second one is still to come.
        self._held = b""
        self._decoders = {each: codecs.getincrementaldecoder("utf-8")(errors="replace") for each in (False, True)}

    def divide(self, piece: bytes) -> Iterator[tuple[bool, str]]:
        """Each part of the next piece: whether it is of stderr, and its text."""
        written = self._held + piece
        self._held = written[-1:] if written.endswith(_BEGIN[:1]) else b""
        written, begin = written[: len(written) - len(self._held)], 0
        for mark in [*_MARK.finditer(written), None]:
            if text := self._decoders[self._is_stderr].decode(written[begin : mark.start() if mark else None]):
                yield self._is_stderr, text
            if mark:
                begin, self._is_stderr = mark.end(), mark[0] == _BEGIN


class _MarkedFile(io.FileIO):
    def __init__(self, descriptor: int) -> None:
        super().__init__(descriptor, "wb", closefd=False)
        self._log = os.fstat(descriptor)

    def write(self, data: bytes | bytearray | memoryview) -> int:  # type: ignore[override]
        # A program may have put a file of its own in the log's place.
        is_log = os.path.samestat(self._log, os.fstat(self.fileno()))
        # In one piece, so that no other thread or process writes between the marks. Less is written before a disk is
        # full, which the next write says.
        left = memoryview(b"".join((_BEGIN, data, _END)) if is_log else data)
        while left:
            left = left[super().write(left) :]
        return len(data)


def mark_stderr() -> None:
    """Put marks around what Python writes to stderr from here on, by lines unless it is flushed."""
    # There is no BufferedWriter, which a signal's handler could not write to while it interrupts a write.
    marked = _MarkedFile(2)
    sys.stderr = io.TextIOWrapper(marked, "utf-8", "backslashreplace", line_buffering=True)
