"""The standard streams of the ``hpctrain`` program, whatever it was started with.

A stream that was closed is ``None`` in Python, and the next file that is opened gets its number: what a library prints
then goes into that file. And a disk behind a stream may be full.
"""

from __future__ import annotations

import errno
import io
import os
import sys
from typing import Any

from hpctrain.common.errors import HpctrainError

STDOUT, STDERR = 1, 2


class OutputError(HpctrainError, OSError):
    """Stdout takes no more. As an OSError it is passed over by what goes on without, as a run does."""

    def __init__(self, error: OSError) -> None:
        why = "it is closed" if error.errno == errno.EBADF else error.strerror
        super().__init__(f"cannot write to stdout: {why}", "send the output somewhere else", exit_code=1)
        self.errno = error.errno


class _Results(io.FileIO):
    """Stdout."""

    def write(self, text: Any, /) -> int:
        try:
            return super().write(text)
        except OSError as error:
            if error.errno == errno.EPIPE:
                # Its reader wanted no more: nothing is wrong.
                raise
            raise OutputError(error) from error


class _Messages(io.FileIO):
    """Stderr. What nobody can be told is dropped: it is no reason to fail."""

    def write(self, text: Any, /) -> int:
        try:
            # None where a pipe that does not block is full, for which a buffer would raise an error.
            return super().write(text) or len(text)
        except OSError:
            return len(text)


def open_streams() -> None:
    """Give this process all three streams, of which stdout says what went wrong and stderr never fails."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            # The lowest number that is free is this one. What is written to the first two is still an error.
            os.open(os.devnull, os.O_WRONLY if number == STDERR else os.O_RDONLY)
            os.set_inheritable(number, True)
    sys.stdout = _text(_Results(STDOUT, "w", closefd=False), sys.stdout, "strict")
    sys.stderr = _text(_Messages(STDERR, "w", closefd=False), sys.stderr, "backslashreplace")


def close_streams(status: int) -> int:
    """Write what is still in the buffers, and return the exit status: 1 where all was well but for that.

    It says what went wrong, unless the reader has gone, or something else had gone wrong before.
    """
    try:
        sys.stdout.flush()
    except OSError as error:
        if error.errno != errno.EPIPE and not status:
            print(f"hpctrain: {error}", file=sys.stderr)
        status = status or 1
    sys.stderr.flush()
    return status


def _text(raw: io.FileIO, before: Any, errors: str) -> io.TextIOWrapper:
    unbuffered = bool(before and before.write_through)
    return io.TextIOWrapper(
        # As Python does with PYTHONUNBUFFERED: what is written through a text ends in a buffer below it.
        raw if unbuffered else io.BufferedWriter(raw),
        encoding=before.encoding if before else None,
        errors=before.errors if before else errors,
        line_buffering=bool(before and before.line_buffering) or raw.fileno() == STDERR,
        write_through=unbuffered,
    )
