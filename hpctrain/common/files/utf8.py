"""Text that any reader of UTF-8 accepts.

Python reads the name of a file that is not UTF-8 with a lone surrogate for each byte that it cannot decode
(:func:`os.fsdecode`), and error messages quote such names. UTF-8 has no form for a lone surrogate, and strict readers
of JSON refuse its escape. Both functions replace it by its Python escape as plain text: ``\\udcff``.
"""

from __future__ import annotations

import json
import re
from typing import Any

# Backslashes and surrogate pairs are matched as wholes, so that what the second half finds is a lone surrogate.
_LONE = re.compile(r"(\\\\|\\ud[89ab]..\\ud[c-f]..)|\\u(?=d[89a-f])")


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
