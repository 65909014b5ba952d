"""Marks in rank 0's log by which a reader tells what the rank wrote to stderr from what it wrote to stdout.

Both streams are the one file, so that their order is kept, and it needs no reader while it is written. The marks are
two control characters each, which terminals pass over. What other programs, and libraries in C, write to stderr has
none. A line of stderr that comes in pieces, as ``print`` writes it, has marks around it as a whole.
"""

from __future__ import annotations

import codecs
import io
import os
import re
import sys
from collections.abc import Iterator
from typing import cast

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
        self._decoders = {
            is_stderr: codecs.getincrementaldecoder("utf-8")(errors="replace") for is_stderr in (False, True)
        }

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
    """One of the two streams, written at once, so that nothing is lost where the process is killed.

    There is no BufferedWriter above, which a signal's handler could not write to while it interrupts a write.
    """

    # Whether the log ends with a part of stderr, whose other mark is still to come.
    _is_open = False

    def __init__(self, descriptor: int) -> None:
        super().__init__(descriptor, "wb", closefd=False)
        self._is_stderr = descriptor == 2
        # As Python names them.
        self.name = "<stderr>" if self._is_stderr else "<stdout>"
        self._log = os.fstat(2)

    def write(self, data: bytes | bytearray | memoryview) -> int:  # type: ignore[override]
        if not data:
            return 0
        begin = end = b""
        if (self._is_stderr or _MarkedFile._is_open) and self._is_log():
            was_open, _MarkedFile._is_open = _MarkedFile._is_open, self._is_stderr and data[-1] != ord("\n")
            if self._is_stderr:
                begin, end = b"" if was_open else _BEGIN, b"" if _MarkedFile._is_open else _END
            else:
                begin = _END
        self._write_whole(begin + data + end)
        return len(data)

    def flush(self) -> None:
        if self._is_stderr and _MarkedFile._is_open and self._is_log():
            _MarkedFile._is_open = False
            self._write_whole(_END)

    def _is_log(self) -> bool:
        """Whether no program has put a file of its own in the log's place."""
        return os.path.samestat(self._log, os.fstat(self.fileno()))

    def _write_whole(self, text: bytes) -> None:
        # In one piece, so that no other thread or process writes between the marks. Less is written before a disk is
        # full, which the next write says.
        left = memoryview(text)
        while left:
            left = left[super().write(left) :]


def mark_stderr() -> None:
    """Put marks around what Python writes to stderr from here on."""
    out, err = _MarkedFile(1), _MarkedFile(2)
    # What a fork writes does not end a line of this process.
    os.register_at_fork(before=err.flush)
    before = cast(io.TextIOWrapper, sys.stdout)
    sys.stdout = io.TextIOWrapper(out, before.encoding, before.errors, write_through=before.write_through)
    sys.stderr = io.TextIOWrapper(err, "utf-8", "backslashreplace", write_through=True)
