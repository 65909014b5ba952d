"""Converts events to lines of a file and back, reads those of a run, and selects those that count."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import re
import reprlib
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property, partial
from io import BufferedReader
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar, get_args

from pydantic import ValidationError
from pydantic_core import from_json

from hpctrain.common.errors import HpctrainError
from hpctrain.common.files.disk import reading
from hpctrain.common.files.printable import dotted, json_text
from hpctrain.common.files.regular import open_regular
from hpctrain.common.run.events.kinds import (
    AfterStepEvent,
    BaseEvent,
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
_AFTER_STEP = frozenset(name for name, kind in _KNOWN.items() if issubclass(kind, AfterStepEvent))


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
    # A crash can glue two lines together.
    if begun and line.rfind(b'"event": "') < begun.end():
        return begun[1]
    try:
        return str(from_json(line)["event"]).encode()
    except (ValueError, LookupError, TypeError):
        return b""


def parse_event(line: bytes, where: str) -> Event:
    """Parse one line of an events file.

    Raises:
        HpctrainError: it is no event, lacks a key of its kind, or has a value that its kind cannot have; says which.
    """
    keys: list[str] = []
    try:
        # The frequent kinds, whose text pydantic parses in a third of the time.
        if (known := _KNOWN.get(kind_of(line))) and _BEGINNING.match(line):
            return known.model_validate_json(line)
        values = from_json(line)
        if not isinstance(values, dict) or not isinstance(values.get("event"), str) or "time" not in values:
            raise ValueError("it lacks 'event' or 'time'")
        return class_of(values).model_validate(values)
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


# Steps and logs at the end that are known: enough for a calm mean, few enough to follow a change.
_NEWEST = 100
Kind = TypeVar("Kind", bound=Event)
Frequent = TypeVar("Frequent", StepEvent, LogEvent)
# A line with its number, from 1.
_Numbered = tuple[int, bytes]


def read_events(path: Path) -> Iterator[Event]:
    """The events of a file, in order. A last line that a crash truncated or damaged is left out.

    Raises:
        HpctrainError: there is no such file, or a line within it is not an event; names the line and what is wrong.
    """
    with reading(path), open_regular(path, links=False) as file:
        for number, line in enumerate(_whole_lines(file), start=1):
            yield parse_event(line, f"{path}:{number}")


def run_id(path: Path) -> str:
    """The identity of a run in all of its attempts, wherever its directory is: the hash of its first event."""
    with open_regular(path, links=False) as file:
        return hashlib.sha256(file.readline(LONGEST_LINE)).hexdigest()[:32]


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


class EventsFile:
    """The events of a run as far as they are written when the object is made; a file that is not there has none.

    Most lines of a long file are steps, or what a script logs. Of these only the newest are kept. Lines are parsed when
    their events are asked for, so that a damaged one stops nobody who needs it not. Each loop over all events reads the
    file anew, so that one of them is in memory at a time.

    Raises:
        HpctrainError: the file cannot be read or is damaged, see :func:`read_events`; from here and all methods.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.lines, self.has_steps = 0, False
        # All lines but those of steps and logs, with the last step of the attempt before each end of an epoch.
        self._outline: list[tuple[bytes, _Numbered]] = []
        self._last: _Numbered | None = None
        # Of the current attempt.
        self._newest: dict[bytes, deque[_Numbered]] = {kind: deque(maxlen=_NEWEST) for kind in (b"step", b"log")}
        with reading(path), contextlib.suppress(FileNotFoundError), open_regular(path, links=False) as file:
            for self.lines, text in enumerate(_whole_lines(file), start=1):
                self._last = self.lines, text
                self._add(kind_of(text), self._last)

    def _add(self, kind: bytes, line: _Numbered) -> None:
        steps = self._newest[b"step"]
        if kind in self._newest:
            self._newest[kind].append(line)
            self.has_steps = self.has_steps or kind == b"step"
            return
        if kind == b"start":
            for newest in self._newest.values():
                newest.clear()
        if steps and kind in _AFTER_STEP:
            self._outline.append((b"step", steps[-1]))
        self._outline.append((kind, line))

    def __iter__(self) -> Iterator[Event]:
        return islice(read_events(self._path), self.lines) if self.lines else iter(())

    @cached_property
    def outline(self) -> list[Event]:
        """All events but steps and logs, with the last step before each end of an epoch: what :func:`kept` needs."""
        return [self._parse(line) for _, line in self._outline]

    def of_kinds(self, *kinds: type[BaseEvent]) -> list[Event]:
        """The events of these kinds, in order: any but steps and logs."""
        names = {kind.model_fields["event"].default.encode() for kind in kinds}
        return [self._parse(line) for name, line in self._outline if name in names]

    def few(self, kind: type[Kind]) -> list[Kind]:
        """The events of one kind, in order: any but steps and logs."""
        return [event for event in self.of_kinds(kind) if isinstance(event, kind)]

    def newest(self, kind: type[Frequent]) -> list[Frequent]:
        """The last hundred steps, or log events, of the last attempt."""
        events = map(self._parse, self._newest[kind.model_fields["event"].default.encode()])
        return [event for event in events if isinstance(event, kind)]

    def last(self) -> Event | None:
        """The last event; None without one."""
        return self._parse(self._last) if self._last else None

    def _parse(self, line: _Numbered) -> Event:
        number, text = line
        return parse_event(text, f"{self._path}:{number}")


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
    limits, logs_stay = _limits(again.outline if isinstance(again, EventsFile) else again)
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
