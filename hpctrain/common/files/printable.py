"""Text of others, which can hold what moves a terminal's cursor or changes it, or what is not UTF-8.

Python reads the name of a file that is not UTF-8 with a lone surrogate for each byte that it cannot decode. UTF-8 has
no form for one, so that :func:`encodable` and :func:`json_text` replace it by its Python escape: ``\\udcff``.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterable
from typing import Any

# C0 without tabulators and new lines, DEL, C1, what turns the direction of writing (Unicode 15, annex 9), and lone
# surrogates, which no stream can write. Those that are the bytes of names that are not UTF-8 stay: no terminal makes a
# control character of them.
_CONTROLS = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udc7f\udd00-\udfff]"
)

# Backslashes and surrogate pairs are matched as wholes, so that what the second half finds is a lone surrogate.
_LONE = re.compile(r"(\\\\|\\ud[89ab]..\\ud[c-f]..)|\\u(?=d[89a-f])")

_LONGEST_KEY = 100
# No sentence is longer, but an error of a library can have a whole tensor in its message.
_LONGEST_TEXT = 4000


def printable(text: str) -> str:
    """The text with its control characters, other than new lines and tabulators, written out as JSON does it."""
    return _CONTROLS.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def shortened(text: str, most: int = _LONGEST_TEXT) -> str:
    """A text of at most ``most`` characters; where some are left out, it ends in an ellipsis."""
    return text if len(text) <= most else f"{text[: most - 1]}…"


def dotted(key: Iterable[object]) -> str:
    """A key of a file with those above it, each without what is beyond any that has a meaning."""
    return ".".join(shortened(str(part), _LONGEST_KEY) for part in key)


def shell_word(path: object) -> str:
    """A file's name as a word of a printed command, which has to run wherever it is copied to.

    A name that begins with a hyphen is no option behind ``./``.
    """
    text = str(path)
    return shlex.quote(f"./{text}" if text.startswith("-") else text)


def encodable(text: str) -> str:
    """The text with its lone surrogates written out."""
    return text.encode(errors="backslashreplace").decode()


def json_text(value: Any, *, indent: int | None = None) -> str:
    """The JSON of a value, in ASCII: lone surrogates in its keys and strings written out, and null for numbers that are
    not finite, of which JSON has none.
    """
    try:
        text = json.dumps(value, indent=indent, allow_nan=False)
    except ValueError:
        text = json.dumps(json.loads(json.dumps(value), parse_constant=lambda _: None), indent=indent)
    # Every step of a run comes here, and hardly any has one.
    return _LONE.sub(lambda found: found[1] or r"\\u", text) if r"\ud" in text else text
