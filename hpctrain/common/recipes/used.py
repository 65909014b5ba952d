"""Selects the values of a recipe that take effect."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel

from hpctrain.common.recipes.own_keys import SectionOfKind
from hpctrain.common.recipes.schema import Communication, Recipe
from hpctrain.common.recipes.sync import Outer, Sync


def used_values(section: BaseModel) -> dict[str, Any]:
    """The values by key, without defaults that mean "none" and without keys of other kinds of a section.

    What is left is the same recipe when it is read again: only defaults are left out.
    """
    values = section.model_dump(mode="json")
    shown = {}
    for key, field in type(section).model_fields.items():
        value = getattr(section, key)
        default = field.get_default(call_default_factory=True)
        if value == default and (value in (None, "", ()) or not _uses(section, key)):
            continue
        shown[key] = used_values(value) if isinstance(value, BaseModel) else _each(value, values[key])
    return shown


def _each(value: Any, dumped: Any) -> Any:
    if isinstance(value, tuple) and value and all(isinstance(each, BaseModel) for each in value):
        return [used_values(each) for each in value]
    return dumped


def _uses(section: BaseModel, key: str) -> bool:
    if isinstance(section, SectionOfKind | Sync | Outer):
        return section.uses(key)
    if isinstance(section, Communication) and key == "top_k":
        return section.compression == "top_k"
    return not isinstance(section, Recipe) or _uses_section(section, key)


def _uses_section(recipe: Recipe, key: str) -> bool:
    match key:
        case "images":
            return recipe.data.name == "imagenet"
        case "sharding":
            return not recipe.mesh.replicates_only
        case "pipeline":
            return recipe.mesh.sizes["pp"] != 1
    return True
