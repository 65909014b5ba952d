"""Prints lines even if the reader has gone."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import TextIO


def say(text: str, stream: TextIO) -> None:
    """Print a line. The run does not end if nobody reads it any more."""
    print(text, file=Patient(stream), flush=True)


class Patient:
    """A stream that accepts everything, even if its reader (``| head``) or its terminal has gone.

    The run goes on then: what it writes to its directory is still wanted.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    @property
    def encoding(self) -> str:
        return self._stream.encoding

    def isatty(self) -> bool:
        return self._stream.isatty()

    def fileno(self) -> int:
        return self._stream.fileno()

    def write(self, text: str) -> int:
        with self._given_up():
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with self._given_up():
            self._stream.flush()

    @contextlib.contextmanager
    def _given_up(self) -> Iterator[None]:
        try:
            yield
        except OSError:
            # Also for what is still in the buffer, and for whoever else writes there.
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self._stream.fileno())
            os.close(nowhere)
