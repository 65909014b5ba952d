"""Converts events to lines of a file, and back."""

from __future__ import annotations

import re
import reprlib
from collections.abc import Mapping
from typing import Any, get_args

from pydantic import ValidationError
from pydantic_core import from_json

from hpctrain.common.errors import HpctrainError
from hpctrain.common.files.printable import dotted
from hpctrain.common.files.utf8 import json_text
from hpctrain.common.run.events.kinds import Event, FaultEvent, KnownEvent, OtherEvent, RecoveredFaultEvent

LONGEST_LINE = 2**24
"""Bytes of an event; the longest that was seen, a stall with a deep stack, has some thousands."""

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
