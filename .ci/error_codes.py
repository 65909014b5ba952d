"""Collects the codes of errors from the source: each with its sentences, remedies, and the modules that raise it."""

from __future__ import annotations

import ast
import string
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "hpctrain"
PREFIX = "HT-"


@dataclass(frozen=True, kw_only=True, order=True)
class Kind:
    """One place where a code stands.

    Attributes:
        sentence: the format string that stands beside it; empty where the text is made elsewhere.
        hint: what mends it, with names in braces for what is known only then; empty where the source does not show it.
        values: the names that the call gives to the sentence; None where they cannot be seen.
        line: of the code.
    """

    code: str
    sentence: str
    hint: str
    module: str
    line: int
    values: frozenset[str] | None

    @property
    def fields(self) -> frozenset[str]:
        """The names that the sentence needs."""
        return frozenset(name for _, name, _, _ in string.Formatter().parse(self.sentence) if name is not None)


@cache
def kinds() -> tuple[Kind, ...]:
    """All places of all codes, in their order."""
    trees = {path: ast.parse(path.read_text()) for path in sorted(PACKAGE.rglob("*.py"))}
    everywhere = {name: text for tree in trees.values() for name, text in _constants(tree).items() if name[0] != "_"}
    made = [kind for path, tree in trees.items() for kind in _kinds(path, tree, everywhere)]
    return tuple(sorted(made, key=lambda kind: (kind.code, kind.sentence, kind.module, kind.line)))


def _constants(tree: ast.Module) -> dict[str, ast.expr]:
    """What the names at the top of a module stand for, where hints may use them."""
    assigned = [node for node in tree.body if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)]
    return {ast.unparse(node.targets[0]): node.value for node in assigned}


def _kinds(path: Path, tree: ast.Module, everywhere: Mapping[str, ast.expr]) -> Iterator[Kind]:
    module = str(path.relative_to(PACKAGE.parent))
    constants = {**everywhere, **_constants(tree)}
    called = {id(node.args[0]): node for node in ast.walk(tree) if isinstance(node, ast.Call) and node.args}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and str(node.value).startswith(PREFIX) and node.value != PREFIX:
            yield _kind(node, called.get(id(node)), module, constants)


def _kind(code: ast.Constant, call: ast.Call | None, module: str, constants: Mapping[str, ast.expr]) -> Kind:
    sentence, remedy, values = "", "", None
    if call and len(call.args) > 1 and isinstance(call.args[1], ast.Constant):
        sentence = str(call.args[1].value)
        remedy = hint(call.args[2], constants) if len(call.args) > 2 else ""
        names = [keyword.arg for keyword in call.keywords]
        values = None if None in names else frozenset(str(name) for name in names) - {"exit_code"}
    return Kind(code=str(code.value), sentence=sentence, hint=remedy, module=module, line=code.lineno, values=values)


def hint(node: ast.expr, constants: Mapping[str, ast.expr]) -> str:
    """A hint as far as the source shows it."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else ""
    if isinstance(node, ast.JoinedStr):
        return "".join(hint(part, constants) for part in node.values)
    if isinstance(node, ast.FormattedValue):
        return hint(node.value, constants) or _name(node.value)
    if isinstance(node, ast.Name) and node.id in constants:
        return hint(constants[node.id], constants)
    if isinstance(node, ast.Call) and ast.unparse(node.func) == "nearest":
        return "valid: {choices}"
    return ""


def _name(node: ast.expr) -> str:
    """The name, in braces, of what an expression shows: ``hosts`` for ``len(self.hosts)``."""
    if isinstance(node, ast.Call) and node.args:
        return _name(node.args[-1])
    if isinstance(node, ast.Subscript):
        return _name(node.value)
    name = str(getattr(node, "attr", getattr(node, "id", ""))).strip("_").lower()
    return f"{{{name}}}" if name else "…"
