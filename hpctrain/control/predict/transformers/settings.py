"""What ``--set`` says about the training of a transformer that no recipe describes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from hpctrain.common.errors import HpctrainError, nearest
from hpctrain.control.predict.transformers.layout import CHOICES, STATES, Layout

# What --mesh, or the batch, decides.
_DECIDED = ("mesh", "micro_batches", "samples")
_FIELDS = {each.name: str(each.type) for each in fields(Layout) if each.name not in _DECIDED}
_OWN = ("batch", "sequence", "software")
SETTINGS: tuple[str, ...] = (*_OWN, *_FIELDS)


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The training of a transformer, besides its mesh.

    Attributes:
        batch: samples of a step over all ranks; None for as many as have about four million tokens.
        sequence: tokens of a sample; None for the network's context.
        layout: fields of :class:`Layout` that were given.
    """

    layout: Mapping[str, Any]
    batch: int | None = None
    sequence: int | None = None
    software: str = "pytorch"


def parse_settings(overrides: Sequence[str]) -> Settings:
    """The settings of texts of the form ``KEY=VALUE``.

    Raises:
        HpctrainError: a key is not known, or its value is not one of its kind.
    """
    own: dict[str, Any] = {}
    layout: dict[str, Any] = {}
    for text in overrides:
        key, _, value = text.partition("=")
        if key not in SETTINGS:
            raise HpctrainError(
                "HT-set-unknown-key",
                "--set {text}: a transformer has no setting {key!r}",
                nearest(key, SETTINGS),
                text=text,
                key=key,
            )
        (own if key in _OWN else layout)[key] = _value(text, key, value)
    return Settings(layout=layout, **own)


def _value(text: str, key: str, value: str) -> Any:
    kind = "int" if key in ("batch", "sequence") else _FIELDS.get(key, "str")
    if kind == "StateBytes":
        return STATES[_one_of(text, value, tuple(STATES))]
    if kind == "bool":
        return _one_of(text, value, ("false", "true")) == "true"
    choices = CHOICES.get(key, ())
    if choices:
        return choices[list(map(str, choices)).index(_one_of(text, value, tuple(map(str, choices))))]
    if kind == "int":
        if not (value.isascii() and value.isdecimal() and len(value) < 10 and (int(value) or key == "prefetch")):
            raise HpctrainError(
                "HT-option-bad-value", "--set {text}: {value!r} is no such number", text=text, value=value
            )
        return int(value)
    return value


def _one_of(text: str, value: str, valid: tuple[str, ...]) -> str:
    if value not in valid:
        raise HpctrainError(
            "HT-choice-unknown",
            "--set {text}: unknown value {value!r}",
            nearest(value, valid),
            text=text,
            value=value,
        )
    return value
