"""Where the sizes of a transformer come from: a known name, or a few words."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import Any

from hpctrain.common.errors import HpctrainError, nearest
from hpctrain.common.files.checked_yaml import Section, load_shipped
from hpctrain.common.recipes.transformer import CHOICES, Transformer

_EXAMPLE = (
    "for example layers=32,width=4096,heads=32,kv_heads=8,mlp=14336,vocabulary=128256,context=8192,kind=swiglu, or "
    "llama3-8b"
)
_NEEDED = ("layers", "width", "heads", "vocabulary", "context")
_KEYS = {field.name: str(field.type) for field in fields(Transformer)}
# Python refuses to read thousands of digits.
_DIGITS = 18


class _KnownFile(Section):
    """Published transformers by name, with fields of :class:`Transformer` that differ within their family.

    ``source`` of a family says where its sizes are, ``parameters`` is the published number.
    """

    families: dict[str, dict[str, Any]]
    transformers: dict[str, dict[str, Any]]


@cache
def _file() -> _KnownFile:
    return load_shipped(Path(__file__).with_name("transformers.yaml"), _KnownFile)


def known() -> Mapping[str, Mapping[str, Any]]:
    """The published transformers that have a name."""
    return _file().transformers


def named(name: str) -> Transformer:
    """A published transformer, if one has this name."""
    found = known().get(name)
    if found is None:
        # Another one, however alike its name, would be another network.
        valid = f"valid: {', '.join(known())}; or its sizes, {_EXAMPLE}"
        raise HpctrainError("HT-choice-unknown", "no transformer {name!r} is known", valid, name=name)
    values = {**_file().families[found["family"]], **found}
    return _made({key: value for key, value in values.items() if key in _KEYS})


def parse(text: str) -> Transformer:
    """The transformer of a text of the form ``layers=32,width=4096,…``.

    By default it is that of GPT-2, and with ``kind=swiglu`` that of Llama; the MLP is four times as wide as the rest.
    """
    values: dict[str, Any] = {}
    for part in text.split(","):
        key, equals, value = part.partition("=")
        if not equals or key not in _KEYS or key in values:
            raise HpctrainError(
                "HT-transformer-not-valid",
                "{text}: {part!r} is not of the form KEY=VALUE with a known key, given once",
                nearest(key, _KEYS),
                text=text,
                part=part,
                key=key,
            )
        values[key] = read_value(text, key, value, kind=_KEYS[key], choices=CHOICES.get(key, ()))
    if missing := [key for key in _NEEDED if key not in values]:
        lacks = ", ".join(missing)
        raise HpctrainError("HT-transformer-not-valid", "{text} lacks {missing}", _EXAMPLE, text=text, missing=lacks)
    return _made({**(_LLAMA if values.get("kind") == "swiglu" else {}), **values})


def read_value(text: str, key: str, value: str, *, kind: str, choices: tuple[object, ...] = ()) -> Any:
    """The value of a field that ``KEY=VALUE`` gives to a dataclass, of ``kind``, or one of few ``choices``."""
    choices = (False, True) if kind == "bool" else choices
    if choices:
        by_name = {str(choice).lower() if kind == "bool" else str(choice): choice for choice in choices}
        if value not in by_name:
            raise HpctrainError(
                "HT-choice-unknown",
                "{text}: {key} is {value!r}",
                nearest(value, tuple(by_name)),
                text=text,
                key=key,
                value=value,
            )
        return by_name[value]
    if kind != "int":
        return value
    if not (value.isascii() and value.isdecimal() and len(value) <= _DIGITS):
        raise HpctrainError(
            "HT-option-bad-value",
            "{text}: {key} is {value!r}, not a whole number of at least 0",
            text=text,
            key=key,
            value=value,
        )
    return int(value)


def transformer(text: str) -> Transformer:
    """A transformer by its name or its sizes."""
    return parse(text) if "=" in text else named(text)


_LLAMA = {"kind": "swiglu", "norm": "rmsnorm", "positions": "rotary", "bias": "none", "tied": False}


def _made(values: dict[str, Any]) -> Transformer:
    values.setdefault("kv_heads", values["heads"])
    values.setdefault("mlp", 4 * values["width"])
    return Transformer(**values)
