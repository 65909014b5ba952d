"""Text of others on a terminal: names, messages and lines of files can hold what moves its cursor or changes it."""

from __future__ import annotations

import re

# C0 without tabulators and new lines, DEL, C1, and what turns the direction of writing (Unicode 15, annex 9). Lone
# surrogates stay: they are the bytes of names that are not UTF-8, of which no terminal makes a control character.
_CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]")


def printable(text: str) -> str:
    """The text with its control characters, other than new lines and tabulators, written out as JSON does it."""
    return _CONTROLS.sub(lambda found: f"\\u{ord(found[0]):04x}", text)
