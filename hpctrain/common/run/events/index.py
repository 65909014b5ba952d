"""``events.index``: where the lines of a long ``events.jsonl`` are that are neither steps nor logs.

It only saves time. It has no event, only places of lines, and is made anew where it does not fit the file: where the
lines at those places, or the file's end at that time, are others than they were, or the file has the same length and
was written since. Whoever may write the events writes it after reading them; it can be deleted at any time.
"""

from __future__ import annotations

import contextlib
import os
import zlib
from collections import deque
from collections.abc import Iterable
from io import BufferedReader
from itertools import starmap
from pathlib import Path
from typing import Annotated, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from hpctrain.common.errors import HpctrainError
from hpctrain.common.files.regular import read_regular
from hpctrain.common.files.whole import write_whole
from hpctrain.common.run.events.kinds import LogEvent, StepEvent
from hpctrain.common.run.events.lines import LONGEST_LINE, kind_of

# Steps and logs at the end whose places are known: enough for a calm mean, few enough to follow a change.
_NEWEST = 100
_END_BYTES = 2**16
_LARGEST = 2**26


# No file is longer, and no seek takes more.
_Count = Annotated[int, Field(ge=0, lt=2**62)]


class LinePlace(NamedTuple):
    """A line: its number from 1, and the bytes before it."""

    number: _Count
    offset: _Count


def _newest() -> deque[LinePlace]:
    return deque(maxlen=_NEWEST)


class LineIndex(BaseModel):
    """The places in a file up to a length.

    Attributes:
        length, lines: how many bytes and lines of the file it covers.
        few: each line that is neither a step nor a log, and the last step before it.
        check: CRC-32 of the lines of ``few``, in order.
        end: CRC-32 of the last bytes that are covered.
        modified: when the file was written last, in nanoseconds, if that is all of it; otherwise 0.
    """

    model_config = ConfigDict(defer_build=True)

    length: _Count = 0
    lines: _Count = 0
    few: list[tuple[LinePlace, LinePlace | None]] = Field(default_factory=list)
    steps: deque[LinePlace] = Field(default_factory=_newest, max_length=_NEWEST)
    logs: deque[LinePlace] = Field(default_factory=_newest, max_length=_NEWEST)
    check: int = 0
    end: int = 0
    modified: int = 0

    def extend(self, lines: Iterable[bytes]) -> None:
        """Take in the next lines."""
        # A long run has millions: a model's fields are slow to set, and named tuples to make.
        number, offset, check = self.lines, self.length, self.check
        steps: deque[tuple[int, int]] = deque(self.steps, maxlen=_NEWEST)
        logs: deque[tuple[int, int]] = deque(self.logs, maxlen=_NEWEST)
        for number, line in enumerate(lines, start=self.lines + 1):
            kind = kind_of(line)
            if kind == b"step":
                steps.append((number, offset))
            elif kind == b"log":
                logs.append((number, offset))
            else:
                self.few.append((LinePlace(number, offset), LinePlace(*steps[-1]) if steps else None))
                check = zlib.crc32(line, check)
            offset += len(line)
        self.lines, self.length, self.check = number, offset, check
        self.steps, self.logs = (deque(starmap(LinePlace, places), maxlen=_NEWEST) for places in (steps, logs))

    def newest(self, kind: type[StepEvent | LogEvent]) -> deque[LinePlace]:
        """The last hundred steps or logs."""
        return self.steps if kind is StepEvent else self.logs

    def last(self) -> LinePlace | None:
        """The last line."""
        return max((*self.steps, *self.logs, *(place for place, _ in self.few[-1:])), default=None)

    def fits(self, file: BufferedReader) -> bool:
        """Whether the index describes this file."""
        now = os.fstat(file.fileno())
        written_since = now.st_size == self.length and now.st_mtime_ns != self.modified
        if now.st_size < self.length or written_since or _end(file, self.length) != self.end:
            return False
        check = end = steps = 0
        for place, step in self.few:
            # One line behind the other: whoever made the index cannot have a long one read again and again.
            if place.offset < end or (step and not steps <= step.offset < place.offset):
                return False
            steps = step.offset if step else steps
            line = line_at(file, place)
            check, end = zlib.crc32(line, check), place.offset + len(line)
        return check == self.check


def line_at(file: BufferedReader, place: LinePlace) -> bytes:
    """The line at a place of a file."""
    file.seek(place.offset)
    return file.readline(LONGEST_LINE)


def load(events: Path, file: BufferedReader) -> LineIndex:
    """The index beside a file of events, which is open; an empty one where there is none that fits."""
    try:
        index = LineIndex.model_validate_json(read_regular(_path(events), _LARGEST, links=False))
    except (OSError, ValidationError):
        return LineIndex()
    return index if index.length and index.fits(file) else LineIndex()


def save(index: LineIndex, events: Path, file: BufferedReader) -> None:
    """Write the index beside a file of events, where that is this user's and can be written."""
    now = os.fstat(file.fileno())
    if now.st_uid != os.geteuid():
        return
    index.end = _end(file, index.length)
    index.modified = now.st_mtime_ns if now.st_size == index.length else 0
    with contextlib.suppress(HpctrainError):
        write_whole(_path(events), index.model_dump_json().encode(), private=True)


def _path(events: Path) -> Path:
    return events.with_suffix(".index")


def _end(file: BufferedReader, length: int) -> int:
    begin = max(0, length - _END_BYTES)
    file.seek(begin)
    return zlib.crc32(file.read(length - begin))
