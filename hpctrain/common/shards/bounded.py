"""Limits on the memory and processor time of this process while a library reads what somebody else made."""

from __future__ import annotations

import contextlib
import json
import math
import os
import resource
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from hpctrain.common.errors import HpctrainError

# Work within the size limits takes a few seconds at most.
_SECONDS = 60
_SIZES = Path("/proc/self/statm")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
# Those of memory that this process began with: some are lower for a time here.
_INHERITED = tuple(resource.getrlimit(kind)[0] for kind in (resource.RLIMIT_AS, resource.RLIMIT_DATA))
# Room for a path and a name, with odd characters escaped as JSON does.
_NOTE_BYTES = 1 << 16
_NOTE_CHARACTERS = 4500


class BeyondLimitsError(HpctrainError):
    """Reading a file took more memory or time than it may, or the library crashed on it.

    Args:
        what: the file, or the part of it.
    """

    def __init__(self, what: str, words: str) -> None:
        super().__init__(
            "HT-file-harmful",
            "{what}: {words}",
            "it is damaged, or made to do harm: leave it out, or get it anew",
            what=what,
            words=words,
        )
        self.what = what
        self.words = words


@dataclass
class Notes:
    """A file that says what a process is reading, for the one that waits for it and finds it ended or stuck."""

    file: int
    _count: int = field(default=0, init=False)

    def write(self, what: str, seconds: float) -> None:
        """Note what is read from now on, and the processor time that it may take; the empty string for nothing."""
        self._count += 1
        os.pwrite(self.file, json.dumps([self._count, seconds, what[-_NOTE_CHARACTERS:]]).encode() + b"\n", 0)

    def read(self) -> tuple[int, float, str]:
        """The number of the note, and the arguments of :meth:`write`."""
        while True:
            line = os.pread(self.file, _NOTE_BYTES, 0).partition(b"\n")[0]
            # The note may be half written at this moment.
            with contextlib.suppress(ValueError):
                count, seconds, what = json.loads(line or b'[0, 0, ""]')
                return count, seconds, what


# Set in a process that :mod:`hpctrain.common.shards.confined` started.
notes: Notes | None = None


@contextlib.contextmanager
def bounded(what: str, memory: int, seconds: float = _SECONDS) -> Iterator[None]:
    """Let this process read something with so many bytes more than it has, and with so many seconds of processor time.

    Time is limited in a confined process only, as the limit ends the process. Not to be nested.

    Raises:
        BeyondLimitsError: it takes more memory.
        HpctrainError: this process may not take that much, so that no failure would show that the file is at fault.
    """
    if (left := _left()) < memory:
        raise HpctrainError(
            "HT-memory-too-small",
            "{subject} is not read: that may take {wanted:.1f} GB of memory, and the limits of this "
            "shell or job leave {left:.1f} GB",
            "ulimit -v unlimited -d unlimited; ulimit -a shows the limits",
            exit_code=1,
            subject=what,
            wanted=memory / 1e9,
            left=left / 1e9,
        )
    before = resource.getrlimit(resource.RLIMIT_CPU)
    if notes:
        notes.write(what, seconds)
        most = int(time.process_time() + seconds) + 1
        resource.setrlimit(resource.RLIMIT_CPU, (most if before[1] < 0 else min(most, before[1]), before[1]))
    try:
        with memory_limit(memory):
            yield
    except MemoryError as error:
        raise BeyondLimitsError(what, f"it takes more than {memory / 1e9:.1f} GB of memory") from error
    finally:
        if notes:
            resource.setrlimit(resource.RLIMIT_CPU, before)
            notes.write("", 0)


@contextlib.contextmanager
def memory_limit(more: int) -> Iterator[None]:
    """Let this process take at most so many bytes of memory more than it has.

    What asks for more gets MemoryError or its library's equivalent; a library that cannot fail (Rust's) ends the
    process. All threads are affected. Memory that files or other processes share does not count.
    """
    before = resource.getrlimit(resource.RLIMIT_DATA)
    _, has = _taken()
    limits = [limit for limit in (has + more, *before) if limit != resource.RLIM_INFINITY]
    resource.setrlimit(resource.RLIMIT_DATA, (min(limits), before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, before)


def _left() -> float:
    """How many bytes of memory the shell or the job leaves this process."""
    return min(
        math.inf if limit == resource.RLIM_INFINITY else limit - taken
        for limit, taken in zip(_INHERITED, _taken(), strict=True)
    )


def _taken() -> tuple[int, int]:
    """The bytes of this process's address space, and those in it that are its own.

    Takes some microseconds: photographs are decoded in a hundred.
    """
    with _SIZES.open("rb", buffering=0) as file:
        sizes = file.read(200).split()
    return int(sizes[0]) * _PAGE_BYTES, int(sizes[5]) * _PAGE_BYTES
