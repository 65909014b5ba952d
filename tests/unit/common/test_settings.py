"""The environment variables of hpctrain: declared once, read by their declarations, documented."""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from hpctrain.common import settings
from hpctrain.common.settings import Setting
from support.pages import ROOT
from support.refusals import refused

_DECLARED = {each.name: each for each in vars(settings).values() if isinstance(each, Setting)}
_VARIABLE = re.compile(r"\b(?<!_)HPCTRAIN_[A-Z]\w*")
_WRONG = {
    "HPCTRAIN_HOST_TIMEOUT": ("", "4", "3601", "1e2", "\u0665\u0660", "9" * 5000),
    "HPCTRAIN_PARAMETER_SERVERS": ("", "0", "-1", "none"),
    "HPCTRAIN_POD_CPUS": ("0", "1.5"),
    "HPCTRAIN_REPLICAS": ("0", "two"),
    "HPCTRAIN_STALL": ("", "0", "nan"),
    "HPCTRAIN_TIMEOUT": ("", "0", "-1", "soon", "nan", "inf", "1e300"),
}


def _named(path: Path) -> Iterator[str]:
    """The variables in a module's code, without its docstrings and comments."""
    tree = ast.parse(path.read_text())
    prose = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in prose:
            yield from _VARIABLE.findall(node.value)
            if node.value == settings.PREFIX:
                yield node.value


def test_no_other_module_names_a_variable() -> None:
    package = Path(settings.__file__).parent.parent
    found = {str(path.relative_to(package)): set(_named(path)) for path in package.rglob("*.py")}
    assert found.pop("common/settings.py") == {*_DECLARED, settings.PREFIX}
    # CMake reads these, in sources of Horovod.
    built = found.pop("control/horovod/adapt.py")
    assert built == {settings.FINGERPRINT.name, settings.MPI_PREFIX.name, settings.RPATH.name}
    assert {name: named for name, named in found.items() if named} == {}, "use hpctrain.common.settings"


def test_every_variable_in_texts_is_declared() -> None:
    paths = [path for folder in ("hpctrain", "slurm", "docs", "benchmarks") for path in (ROOT / folder).rglob("*")]
    texts = [path.read_text() for path in paths if path.suffix in (".py", ".j2", ".md", ".yaml")]
    assert {name for text in texts for name in _VARIABLE.findall(text)} == set(_DECLARED)


@pytest.mark.parametrize(("name", "text"), [(name, text) for name, texts in _WRONG.items() for text in texts])
def test_a_wrong_value_is_refused_by_name(name: str, text: str) -> None:
    with refused("HT-variable-invalid", name=name, value=text) as raised:
        _DECLARED[name].read({name: text})
    assert raised.value.hint == f"unset {name}"


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("HPCTRAIN_BACKEND", "mpi", "mpi"),
        ("HPCTRAIN_HOST_TIMEOUT", "5", 5),
        ("HPCTRAIN_POD_CPUS", "", None),
        ("HPCTRAIN_POD_CPUS", "7", 7),
        ("HPCTRAIN_TIMEOUT", "0.5", 0.5),
        ("HPCTRAIN_TIMEOUT", "1e6", 1e6),
    ],
)
def test_a_right_value_is_read(name: str, text: str, value: object) -> None:
    read = _DECLARED[name].read({name: text})
    assert (type(read), read) == (type(value), value)


@pytest.mark.parametrize("name", _DECLARED)
def test_what_is_not_set_has_its_default(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.delenv(name, raising=False)
    assert _DECLARED[name].read() == _DECLARED[name].default == _DECLARED[name].read({})
    assert name not in os.environ
