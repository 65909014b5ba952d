"""The ``hpctrain`` program: the command line in a process of its own.

Its standard streams may be closed, or on a full disk. A stream that was closed is ``None`` in Python, and the next file
that is opened gets its number, so that a library's messages would go into that file.
"""

from __future__ import annotations

import atexit
import errno
import gc
import io
import os
import sys
from typing import Any, NoReturn

from hpctrain.common.errors import HpctrainError

STDOUT, STDERR = 1, 2

# A command is mostly imports, whose objects live to its end, so that collecting garbage among them only takes time.
_COLLECT_AFTER = 50_000


def program() -> NoReturn:
    """Run the command line, and end without freeing each object, because the system frees them all at once.

    Functions that are registered with :mod:`atexit` are called.
    """
    gc.set_threshold(_COLLECT_AFTER)
    open_streams()
    status = 1

    def leave() -> None:
        os._exit(close_streams(status))

    # Registered first, so that it is called last.
    atexit.register(leave)
    from hpctrain.cli.main import main

    status = main()
    sys.exit(status)


class OutputError(HpctrainError, OSError):
    """Stdout cannot be written. It is an OSError too, because a run ignores these and goes on without its output."""

    def __init__(self, error: OSError) -> None:
        why = "it is closed" if error.errno == errno.EBADF else error.strerror
        sentence = "cannot write to stdout: {reason}"
        super().__init__("HT-output-not-written", sentence, "send the output somewhere else", exit_code=1, reason=why)
        self.errno = error.errno


class _Results(io.FileIO):
    """Stdout."""

    def write(self, text: Any, /) -> int:
        try:
            return super().write(text)
        except OSError as error:
            if error.errno == errno.EPIPE:
                # The reader has stopped reading, which is no fault.
                raise
            raise OutputError(error) from error


class _Messages(io.FileIO):
    """Stderr. Messages that cannot be written are dropped, because that is no reason to fail."""

    def write(self, text: Any, /) -> int:
        try:
            # None where a pipe that does not block is full, for which a buffer would raise an error.
            return super().write(text) or len(text)
        except OSError:
            return len(text)


def open_streams() -> None:
    """Give this process all three streams. Stdout raises :class:`OutputError`, and stderr never fails."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            # The null device gets this number, the lowest free one. Writing to the first two still fails.
            os.open(os.devnull, os.O_WRONLY if number == STDERR else os.O_RDONLY)
            os.set_inheritable(number, True)
    sys.stdout = _text(_Results(STDOUT, "w", closefd=False), sys.stdout, "strict")
    sys.stderr = _text(_Messages(STDERR, "w", closefd=False), sys.stderr, "backslashreplace")


def close_streams(status: int) -> int:
    """Flush the buffers, and return the exit status: 1 if nothing but this failed.

    The failure is printed, unless the reader has gone, or the command had failed before.
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
        # Python does the same with PYTHONUNBUFFERED, because write_through only reaches the buffer below the text.
        raw if unbuffered else io.BufferedWriter(raw),
        encoding=before.encoding if before else None,
        errors=before.errors if before else errors,
        line_buffering=bool(before and before.line_buffering) or raw.fileno() == STDERR,
        write_through=unbuffered,
    )
