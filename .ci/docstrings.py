"""Griffe extension: docstrings have roles and literal blocks of reStructuredText, and pages are Markdown."""

from __future__ import annotations

import re
from typing import Any

import griffe

_ROLE = re.compile(r":(?:class|func|data|meth|attr|mod):`~?([\w.]+)`")
_LITERAL_BLOCK = re.compile(r"::$", re.MULTILINE)


class Markdown(griffe.Extension):
    """Rewrites each docstring: a role becomes a link where its target is on a page, ``::`` a colon."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Called by griffe for each module, class, function and attribute."""
        if obj.docstring:
            text = _ROLE.sub(r'<autoref identifier="\1" optional><code>\1</code></autoref>', obj.docstring.value)
            obj.docstring.value = _LITERAL_BLOCK.sub(":", text)
