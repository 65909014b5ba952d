"""Events as lines of a file, and back."""

from __future__ import annotations

import json
import reprlib
from functools import cache
from typing import Any

from pydantic import TypeAdapter, ValidationError

from hpctrain.errors import HpctrainError
from hpctrain.run.events.kinds import FATAL, RECOVERED, Event, KnownEvent, LogEvent, OtherEvent, StallEvent, StepEvent


def line_of(event: Event) -> bytes:
    """The line of an event, with its end."""
    return json.dumps(event.record()).encode() + b"\n"


def mark(kind: type[StepEvent | LogEvent | StallEvent]) -> bytes:
    """What every line of a frequent kind holds, after the time; a reader can tell the kind by it without parsing."""
    return f'"event": "{kind.model_fields["event"].default}"'.encode()


def parse_event(line: bytes, where: str) -> Event:
    """One line of an events file.

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
        return _parsed(value)
    except ValidationError as error:
        raise HpctrainError(f"{where}: the event {value['event']!r} {_fault(value, error)}") from error


def _parsed(value: dict[str, Any]) -> Event:
    try:
        return _known().validate_python(value)
    except ValidationError as error:
        if error.errors()[0]["type"] != "union_tag_invalid":
            raise
    return OtherEvent.model_validate(value)


@cache
def _known() -> TypeAdapter[KnownEvent]:
    return TypeAdapter(KnownEvent)


def _fault(value: dict[str, Any], error: ValidationError) -> str:
    """What is wrong with an event, by its keys."""
    wrong: dict[str, str] = {}
    for each in error.errors(include_url=False, include_context=False):
        place = each["loc"]
        # Ahead of the key are the tags of the unions; a kind that is not known has none.
        tags = 0 if len(place) == 1 else 2 if place[1] in (FATAL, RECOVERED) and len(place) > 2 else 1
        wrong.setdefault(str(place[tags]), each["msg"])
    if missing := [key for key in wrong if key not in value]:
        return f"lacks {', '.join(map(repr, missing))}"
    names = {key: key if key.isprintable() else repr(key) for key in wrong}
    return "; ".join(f"cannot have {names[key]} = {reprlib.repr(value[key])}: {why}" for key, why in wrong.items())
