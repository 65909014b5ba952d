"""Converts events to lines of a file and back, reads those of a run, and selects those that count."""

from __future__ import annotations

import contextlib
import errno
import re
import reprlib
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from io import BufferedReader
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, get_args, overload

from pydantic import ValidationError
from pydantic_core import from_json

from hpctrain.common.errors import HpctrainError
from hpctrain.common.files.disk import reading
from hpctrain.common.files.printable import dotted, json_text
from hpctrain.common.files.regular import open_regular
from hpctrain.common.run.events.kinds import (
    AfterStepEvent,
    ContinuedEvent,
    Event,
    FaultEvent,
    KnownEvent,
    LogEvent,
    OtherEvent,
    RecoveredFaultEvent,
    RunEvent,
    StartEvent,
    StepEvent,
    StoppedEvent,
)

LONGEST_LINE = 2**24
"""Bytes of an event; the longest that was seen has some thousands."""

CLASSES: dict[str, type[KnownEvent]] = {kind.model_fields["event"].default: kind for kind in get_args(KnownEvent)}

_RECOVERED = RecoveredFaultEvent.model_fields.keys() - FaultEvent.model_fields.keys()
# Without faults, for which there are two classes.
_KNOWN = {name.encode(): kind for name, kind in CLASSES.items() if not issubclass(kind, FaultEvent)}


def class_of(values: Mapping[str, Any]) -> type[Event]:
    """The class of an event, by its line's keys and values."""
    kind = values["event"]
    if kind == "fault":
        # One that lost a key is refused, and not taken for a fault that ended the run.
        return RecoveredFaultEvent if _RECOVERED & values.keys() else FaultEvent
    return CLASSES.get(kind, OtherEvent)


def line_of(event: Event) -> bytes:
    """The line of an event, with its end."""
    return json_text(event.record()).encode() + b"\n"


# How EventWriter begins a line.
_BEGINNING = re.compile(rb'\{"time": [\d.e+-]+, "event": "(\w+)", ')


def kind_of(line: bytes) -> bytes:
    """The kind of an event, nearly always by the beginning of its line alone; empty for what is no event.

    Of a line with a known kind the rest may still be damaged.
    """
    begun = _BEGINNING.match(line)
    # A crash can glue two lines together, and a key that is there twice has its last value.
    if begun and line.rfind(b'"event": "') < begun.end():
        return begun[1]
    try:
        kind = str(from_json(line)["event"]).encode()
    except (ValueError, LookupError, TypeError):
        return b""
    return b"" if begun and begun[1] != kind else kind


def parse_known(line: bytes) -> Event | None:
    """The same as :func:`parse_event` in a third of the time; None for a line that is to be looked at closely."""
    known = _KNOWN.get(kind_of(line))
    try:
        return known.model_validate_json(line) if known else None
    except ValidationError:
        return None


def parse_event(line: bytes, where: str) -> Event:
    """Parse one line of an events file.

    Args:
        line: one line of the file, with or without its newline.
        where: the file, and the line's number where it is known.

    Raises:
        HpctrainError: it is no event, lacks a key of its kind, or has a value that its kind cannot have; says which.
    """
    if known := parse_known(line):
        return known
    keys: list[str] = []
    try:
        return _parse_closely(line)
    except ValidationError as error:
        faults = error.errors(include_url=False, include_context=False)
        # Where a script logs values, names are its own.
        places = [[part if part.isprintable() else repr(part) for part in map(str, fault["loc"])] for fault in faults]
        keys = [*map(dotted, places)]
        problems = [
            f"no {key}" if fault["type"] == "missing" else f"{key} = {reprlib.repr(fault['input'])}: {fault['msg']}"
            for key, fault in zip(keys, faults, strict=True)
        ]
        problem = f"{kind_of(line).decode()!r} has {'; '.join(problems)}"
    except ValueError as error:
        problem = str(error)
    raise HpctrainError("HT-event-invalid", "{where}: not an event: {problem}", where=where, problem=problem, keys=keys)


def _parse_closely(line: bytes) -> Event:
    values = from_json(line)
    if not isinstance(values, dict) or not isinstance(values.get("event"), str) or "time" not in values:
        raise ValueError("it lacks 'event' or 'time'")
    if (begun := _BEGINNING.match(line)) and begun[1].decode() != values["event"]:
        raise ValueError(f"it is {begun[1].decode()!r}, and {values['event']!r} too")
    return class_of(values).model_validate(values)


_BLOCK_BYTES = 2**18
# Steps and logs at the end that are known: enough for a calm mean, few enough to follow a change.
_NEWEST = 100
Kind = TypeVar("Kind", bound=Event)
Frequent = TypeVar("Frequent", StepEvent, LogEvent)


def read_events(path: Path) -> Iterator[Event]:
    """The events of a file, in order. A last line that a crash truncated or damaged is left out.

    Raises:
        HpctrainError: there is no such file, or a line within it is not an event; names the line and what is wrong.
    """
    with reading(path), open_regular(path, links=False) as file:
        for number, line in enumerate(_whole_lines(file), start=1):
            yield parse_event(line, f"{path}:{number}")


def _whole_lines(file: BufferedReader) -> Iterator[bytes]:
    last = b""
    for line in iter(partial(file.readline, LONGEST_LINE), b""):
        if not line.endswith(b"\n"):
            if len(line) == LONGEST_LINE:
                raise OSError(errno.EFBIG, f"a line is longer than {LONGEST_LINE / 1e6:.0f} MB, which no event is")
            break
        if last:
            yield last
        last = line
    if intact_length(last):
        yield last


class _Line(NamedTuple):
    """A line that is neither a step nor a log, or the newest of those.

    Attributes:
        number: from 1.
        offset: the bytes before it.
        kind: of its event; empty for what is none.
        step: the last step of the attempt before it.
    """

    number: int
    offset: int
    kind: bytes
    step: _Line | None = None


class EventsFile:
    """The events of a run as far as they are written now; a file that is not there has none.

    Each loop reads the file anew, so that no more than one event is in memory. Most lines of a long file are steps, or
    what a script logs. Where the others are is found once, without parsing any of them.

    Attributes:
        lines: the number of lines.
        has_steps: whether any attempt has made a step.

    Raises:
        HpctrainError: the file cannot be read or is damaged, see :func:`read_events`; from here and all methods.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.lines, self.has_steps = 0, False
        self._few: list[_Line] = []
        self._last: _Line | None = None
        with reading(path), contextlib.suppress(FileNotFoundError), open_regular(path, links=False) as file:
            self._find_lines(file)

    def _find_lines(self, file: BufferedReader) -> None:
        # Of the current attempt. A long run has millions of lines, so these are tuples.
        newest: dict[bytes, deque[tuple[int, int]]] = {kind: deque(maxlen=_NEWEST) for kind in (b"step", b"log")}
        steps, offset, place, kind = newest[b"step"], 0, (0, 0), b""
        for self.lines, line in enumerate(_whole_lines(file), start=1):
            kind, place = kind_of(line), (self.lines, offset)
            if kind in newest:
                newest[kind].append(place)
            else:
                if kind == b"start":
                    self.has_steps = self.has_steps or bool(steps)
                    newest[b"step"].clear()
                    newest[b"log"].clear()
                self._few.append(_Line(*place, kind, _Line(*steps[-1], b"step") if steps else None))
            offset += len(line)
        self._newest = {kind: [_Line(*line, kind) for line in lines] for kind, lines in newest.items()}
        self.has_steps = self.has_steps or bool(steps)
        self._last = _Line(*place, kind) if self.lines else None

    def __iter__(self) -> Iterator[Event]:
        if not self.lines:
            return
        with reading(self._path), open_regular(self._path, links=False) as file:
            for number in range(1, self.lines + 1):
                yield self._parse(file.readline(LONGEST_LINE), number)

    @overload
    def few(self, kind: type[Kind], /) -> list[Kind]: ...
    @overload
    def few(self, *kinds: type[Event]) -> list[Event]: ...
    def few(self, *kinds: type[Any]) -> list[Any]:
        """The events of these kinds, in order: any but steps and logs."""
        return [event for event in self.outline(*kinds) if isinstance(event, kinds)]

    def outline(self, *kinds: type[Event]) -> Iterator[Event]:
        """The same, or all events but steps and logs where no kind is named, with the last step of the attempt before
        each end of an epoch: what :func:`kept` needs, if :data:`BOUNDS` are among them.
        """
        names = {kind.model_fields["event"].default.encode() for kind in kinds}
        # What is no event is parsed too, which says so.
        lines = [line for line in self._few if not names or not line.kind or line.kind in names]
        last = None
        for line, event in zip(lines, self._events(lines), strict=True):
            if line.step and isinstance(event, AfterStepEvent):
                if last is None or line.step != last[0]:
                    last = line.step, next(self._events([line.step]))
                yield last[1]
            yield event

    def newest(self, kind: type[Frequent]) -> list[Frequent]:
        """The last hundred steps, or log events, of the last attempt."""
        lines = self._newest[kind.model_fields["event"].default.encode()] if self.lines else []
        return [event for event in self._events(lines) if isinstance(event, kind)]

    def last(self) -> Event | None:
        """The last event; None without one."""
        return next(self._events([self._last] if self._last else []), None)

    def _events(self, lines: Sequence[_Line]) -> Iterator[Event]:
        if not lines:
            return
        with reading(self._path), open_regular(self._path, links=False) as file:
            for line in lines:
                file.seek(line.offset)
                yield self._parse(file.readline(LONGEST_LINE), line.number)

    def _parse(self, line: bytes, number: int) -> Event:
        return parse_known(line) or parse_event(line, f"{self._path}:{number}")


# By which it is known what was lost and done again.
BOUNDS = (StartEvent, RunEvent, StoppedEvent, ContinuedEvent)


def count_lines(path: Path) -> int:
    """How many lines a file has; 0 for one that cannot be read."""
    try:
        with open_regular(path, links=False) as file:
            return sum(block.count(b"\n") for block in iter(lambda: file.read(_BLOCK_BYTES), b""))
    except OSError:
        return 0


def intact_length(text: bytes) -> int:
    """The length of the text up to its last whole line. A crash of the machine can leave zeros in that line."""
    end = text.rfind(b"\n") + 1
    begin = text.rfind(b"\n", 0, max(end - 1, 0)) + 1
    return begin if b"\0" in text[begin:end] else end


def attempts(events: Iterable[Event]) -> list[list[Event]]:
    """Divide the events at each start, which begins its part; ranks started by hand have a part without one."""
    parts: list[list[Event]] = []
    for event in events:
        if isinstance(event, StartEvent) or not parts:
            parts.append([])
        parts[-1].append(event)
    return parts


def kept(events: EventsFile | Iterable[Event]) -> Iterator[Event]:
    """The events of a run without those that were lost and repeated, such as steps, epochs and checkpoints.

    A run has one start an attempt. What lies after the checkpoint that an attempt goes on from was lost, although its
    events are in the file. A script has loaded its state by an attempt's first step, and then says where it goes on.
    Attempts that begin later than the events are not known to lose anything.
    """
    again = events if isinstance(events, EventsFile) else [*events]
    limits, logs_stay = _limits(again.few(*BOUNDS) if isinstance(again, EventsFile) else again)
    limit, done, recipe = limits.pop(), 0, False
    for event in again:
        if isinstance(event, StepEvent):
            # The most frequent kind, for which all of the rest comes to this.
            done = event.iteration
            if limit is None or done <= limit:
                yield event
            continue
        if isinstance(event, StartEvent):
            limit = limits.pop() if limits else None
        if isinstance(event, StartEvent | ContinuedEvent):
            done = event.iteration
        elif isinstance(event, RunEvent):
            recipe = event.recipe is not None
        needed = event.last_step_needed(done) - (logs_stay and isinstance(event, LogEvent))
        if limit is None or needed <= limit:
            yield event
        if isinstance(event, StoppedEvent) and not recipe:
            limit, done = limits.pop() if limits else None, 0


def _limits(events: Iterable[Event]) -> tuple[list[int | None], bool]:
    """Up to which iteration events count, the last part of the run first; and whether what a script logs after the step
    behind which it goes on is not logged again.

    A part ends at each start, and where a script has stopped: then it has saved its state, and what came before is
    never lost.
    """
    # A number undoes earlier events down to that iteration; None makes sure that earlier events stay.
    marks: list[int | None] = []
    told, logs_stay, recipe = 0, False, False
    for event in events:
        if isinstance(event, StartEvent):
            marks.append(event.iteration)
        elif isinstance(event, RunEvent):
            recipe = event.recipe is not None
        elif isinstance(event, StoppedEvent) and not recipe:
            marks.append(None)
        elif isinstance(event, ContinuedEvent):
            # Better known than what was taken for true of a script until then.
            marks[told:] = [event.iteration] * (len(marks) - told)
            told = len(marks)
            logs_stay = True
    limits: list[int | None] = []
    limit: int | None = None
    for mark in reversed(marks):
        limits.append(limit)
        limit = mark if mark is None or limit is None else min(limit, mark)
    return [*limits, limit], logs_stay
