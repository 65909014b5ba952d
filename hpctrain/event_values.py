"""What the values of events can be: readers calculate with them, and a file can hold anything."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

# Beyond, numbers are not whole any more where they meet others; and no clock shows so many seconds.
_MOST_COUNT = 2**53
_MOST_SECONDS = 1e11


def _count(value: Any) -> bool:
    return isinstance(value, int) and 0 <= value < _MOST_COUNT


def _count_or_none(value: Any) -> bool:
    return value is None or _count(value)


def _number(value: Any) -> bool:
    return value is None or isinstance(value, float) or (isinstance(value, int) and abs(value) < _MOST_COUNT)


def _numbers(value: Any) -> bool:
    return isinstance(value, dict) and all(map(_number, value.values()))


def _seconds(value: Any) -> bool:
    return isinstance(value, (int, float)) and 0 <= value < _MOST_SECONDS


def _seconds_or_none(value: Any) -> bool:
    return value is None or _seconds(value)


def _finite(value: Any) -> bool:
    return value is not None and _number(value) and math.isfinite(value)


def _text(value: Any) -> bool:
    return isinstance(value, str)


def _text_or_none(value: Any) -> bool:
    return value is None or isinstance(value, str)


def _texts(value: Any) -> bool:
    return isinstance(value, list) and all(map(_text, value))


def _texts_or_none(value: Any) -> bool:
    return value is None or _texts(value)


def _counts(value: Any) -> bool:
    return isinstance(value, list) and all(map(_count, value))


def _non_finite_rule(value: Any) -> bool:
    return value in ("stop", "skip", "roll_back")


def _differences(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(pair, list) and len(pair) == 2 for pair in value.values())


def _timeline(value: Any) -> bool:
    return isinstance(value, list) and all(
        isinstance(row, list) and len(row) == 3 and _seconds(row[0]) and _text(row[1]) and _count(row[2])
        for row in value
    )


Rule = Callable[[Any], bool]
# By kind; a key that is not here can have any value, and so can all of a kind that is not here.
_RULES: dict[str, dict[str, Rule]] = {
    "start": {"attempt": _count, "iteration": _count, "hosts": _texts_or_none, "host": _text_or_none},
    "damaged": {"path": _text, "fault": _text, "kept_as": _text},
    "changed": {"differences": _differences},
    "run": {
        "recipe": _text_or_none,
        "framework": _text_or_none,
        "backend": _text,
        "ranks": _count,
        "epochs": _count_or_none,
        "iterations_per_epoch": _count_or_none,
        "parameters": _count_or_none,
    },
    "step": {
        "iteration": _count,
        "epoch": _count_or_none,
        "loss": _number,
        "learning_rate": _number,
        "samples": _count_or_none,
        "seconds": _seconds,
        "communication_seconds": _seconds_or_none,
        "data_seconds": _seconds_or_none,
    },
    "log": {"iteration": _count, "values": _numbers},
    "non_finite": {
        "iteration": _count,
        "epoch": _count,
        "rule": _non_finite_rule,
        "ranks": _counts,
        "parameters": _count,
        "parameter": _text_or_none,
        "to": _count_or_none,
    },
    "spike": {"iteration": _count, "epoch": _count, "loss": _finite, "median": _finite},
    "epoch": {"epoch": _count, "seconds": _seconds},
    "broken_images": {"epoch": _count, "count": _count, "names": _texts},
    "checkpoint": {"iteration": _count, "epoch": _count, "seconds": _seconds},
    "overlap": {"iteration": _count, "timeline": _timeline},
    "stopped": {"iteration": _count, "reason": _text},
    "stall": {
        "rank": _count,
        "host": _text,
        "iteration": _count_or_none,
        "waiting_for": _text,
        "seconds": _seconds,
    },
    "fault": {
        "rank": _count_or_none,
        "host": _text_or_none,
        "message": _text,
        "recovery_seconds": _seconds,
    },
    "end": {"status": _text, "seconds": _seconds_or_none},
}
# Of a rank without which the others went on.
_HEALED = {"iteration": _count, "samples_affected": _count, "ranks": _count}


def wrong_keys(event: Mapping[str, Any]) -> list[str]:
    """The keys of an event whose values no reader can take; those that are missing are not among them."""
    kind = event["event"]
    rules = {"time": _seconds, **_RULES.get(kind, {})}
    if kind == "epoch":
        # Whatever else was measured.
        rules = {**{key: _number for key in event if key != "event"}, **rules}
    if kind == "fault" and "recovery_seconds" in event:
        rules |= _HEALED
    return [key for key, rule in rules.items() if key in event and not rule(event[key])]
