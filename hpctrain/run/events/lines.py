"""Converts events to lines of a file, and back."""

from __future__ import annotations

import json
import reprlib

from pydantic import ValidationError

from hpctrain.errors import HpctrainError
from hpctrain.files.utf8 import json_text
from hpctrain.run.events.kinds import Event, LogEvent, StallEvent, StepEvent, class_of


def line_of(event: Event) -> bytes:
    """The line of an event, with its end."""
    return json_text(event.record()).encode() + b"\n"


def mark(kind: type[StepEvent | LogEvent | StallEvent]) -> bytes:
    """Text in every line of a frequent kind, after the time, by which a reader recognises the kind without parsing."""
    return f'"event": "{kind.model_fields["event"].default}"'.encode()


def parse_event(line: bytes, where: str) -> Event:
    """Parse one line of an events file.

    Args:
        line: with or without its end.
        where: the file, and the line's number where it is known.

    Raises:
        HpctrainError: it is no event, lacks a key of its kind, or has a value that its kind cannot have; says which.
    """
    try:
        # Not the bytes: zeros in a damaged line would be taken for another encoding.
        value = json.loads(line.decode())
    except (ValueError, RecursionError) as error:
        raise HpctrainError(f"{where}: not an event: {error}") from error
    if not isinstance(value, dict) or not isinstance(value.get("event"), str) or "time" not in value:
        raise HpctrainError(f"{where}: not an event: it lacks 'event' or 'time'")
    try:
        return class_of(value).model_validate(value)
    except ValidationError as error:
        raise HpctrainError(f"{where}: the event {value['event']!r} {_fault(error)}") from error


def _fault(error: ValidationError) -> str:
    """The faults of an event, by its keys."""
    missing: list[str] = []
    wrong: dict[str, str] = {}
    for each in error.errors(include_url=False, include_context=False):
        name = ".".join(part if part.isprintable() else repr(part) for part in map(str, each["loc"]))
        if each["type"] == "missing":
            missing.append(f"'{name}'")
        else:
            key = str(each["loc"][0])
            wrong.setdefault(key, f"cannot have {name} = {reprlib.repr(each['input'])}: {each['msg']}")
    return "; ".join([f"lacks {', '.join(missing)}"] * bool(missing) + [*wrong.values()])
