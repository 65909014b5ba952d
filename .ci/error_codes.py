"""Collects the codes of errors from the source: each with its sentences, and the modules that raise it."""

from __future__ import annotations

import ast
import string
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "hpctrain"
PREFIX = "HT-"


@dataclass(frozen=True, kw_only=True, order=True)
class Kind:
    """One place where a code stands.

    Attributes:
        sentence: the format string that stands beside it; empty where the text is made elsewhere.
        values: the names that the call gives to the sentence; None where they cannot be seen.
        line: of the code.
    """

    code: str
    sentence: str
    module: str
    line: int
    values: frozenset[str] | None

    @property
    def fields(self) -> frozenset[str]:
        """The names that the sentence needs."""
        return frozenset(name for _, name, _, _ in string.Formatter().parse(self.sentence) if name is not None)


def kinds() -> list[Kind]:
    """All places of all codes, in their order."""
    return sorted(_kinds(), key=lambda kind: (kind.code, kind.sentence, kind.module, kind.line))


def _kinds() -> Iterator[Kind]:
    for path in sorted(PACKAGE.rglob("*.py")):
        module = str(path.relative_to(PACKAGE.parent))
        tree = ast.parse(path.read_text())
        called = {id(node.args[0]): node for node in ast.walk(tree) if isinstance(node, ast.Call) and node.args}
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and str(node.value).startswith(PREFIX) and node.value != PREFIX:
                yield _kind(node, called.get(id(node)), module)


def _kind(code: ast.Constant, call: ast.Call | None, module: str) -> Kind:
    sentence, values = "", None
    if call and len(call.args) > 1 and isinstance(call.args[1], ast.Constant):
        sentence = str(call.args[1].value)
        names = [keyword.arg for keyword in call.keywords]
        values = None if None in names else frozenset(str(name) for name in names) - {"exit_code"}
    return Kind(code=str(code.value), sentence=sentence, module=module, line=code.lineno, values=values)
