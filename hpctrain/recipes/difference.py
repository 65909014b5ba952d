"""Recipes as dotted keys, and where two of them differ."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from hpctrain.recipes.schema import Recipe

# What a recipe says of itself, and not of the training.
_ABOUT = {"name", "source", "cost", "reported"}


def flat(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The values of a tree with dotted keys."""
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def differences(one: Recipe, other: Recipe) -> dict[str, tuple[Any, Any]]:
    """The values of the training in which they differ, by dotted key; None for one that a recipe does not have."""
    first, second = (dict(flat(recipe.model_dump(mode="json", exclude=_ABOUT))) for recipe in (one, other))
    keys = dict.fromkeys([*first, *second])
    return {key: (first.get(key), second.get(key)) for key in keys if first.get(key) != second.get(key)}
