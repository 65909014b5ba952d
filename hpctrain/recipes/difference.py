"""Recipes as dotted keys, and where two of them differ."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import BaseModel

# What a recipe says of itself, and not of the training.
_ABOUT = {"name", "source", "cost", "reported"}


def flat(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The values of a tree with dotted keys."""
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def settings(work: BaseModel) -> dict[str, Any]:
    """The values of a recipe or script that decide what it does, by dotted key, as JSON has them."""
    return dict(flat(work.model_dump(mode="json", exclude=_ABOUT)))


def differences(one: BaseModel, other: BaseModel) -> dict[str, tuple[Any, Any]]:
    """The values of two recipes, or scripts, in which they differ, by dotted key; None for one that is not there."""
    first, second = settings(one), settings(other)
    keys = dict.fromkeys([*first, *second])
    return {key: (first.get(key), second.get(key)) for key in keys if first.get(key) != second.get(key)}
