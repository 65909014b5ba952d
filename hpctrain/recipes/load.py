"""Recipe files and ``--set`` overrides, checked against the schema."""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import BaseModel

from hpctrain.checked_yaml import Location, parse_value, subsection, validate
from hpctrain.errors import HpctrainError, nearest
from hpctrain.recipes.entries import HINT, Listed, load_entry
from hpctrain.recipes.schema import Recipe


def load_recipe(name_or_path: str, overrides: Sequence[str] = ()) -> Recipe:
    """A recipe that can be run, with ``key=value`` overrides.

    Args:
        name_or_path: as :func:`~hpctrain.recipes.entries.load_entry` takes it.
        overrides: ``optimizer.learning_rate=0.2`` each; the value is YAML.

    Raises:
        HpctrainError: no such recipe, one that cannot be run, with what is missing, or something in it or in
            an override that the schema refuses; names the file, the line and the key.
    """
    entry = load_entry(name_or_path)
    if isinstance(entry, Listed):
        missing = "".join(f"\n  - {text}" for text in entry.missing)
        raise HpctrainError(
            f"{entry.name} cannot be run; what is missing:{missing}",
            f"hpctrain recipes show {name_or_path} prints what is known",
        )
    return override_recipe(entry, overrides) if overrides else entry


def override_recipe(recipe: Recipe, overrides: Sequence[str]) -> Recipe:
    """The recipe with ``key=value`` overrides; arguments and errors are those of :func:`load_recipe`.

    ``fault_tolerance=shrink`` leaves the rest of its section as it is, or as other overrides have it.
    """
    values = recipe.model_dump(mode="json")
    given: dict[str, str] = {}
    for override in sorted(overrides, key=lambda override: not override.startswith("fault_tolerance=")):
        key, equals, text = override.partition("=")
        if not (key and equals):
            raise HpctrainError(f"--set {override}: not of the form key=value", "for example --set epochs=5")
        _check_key(key)
        value = parse_value(text, "recipe", f"--set {override}")
        if (key, value) == ("fault_tolerance", "shrink"):
            key = "fault_tolerance.lost_rank"
        *sections, last = key.split(".")
        target = values
        for name in sections:
            target = target[name]
            if not isinstance(target, dict):
                raise HpctrainError(f"--set {override}: {name} was set to {target!r} before, which has no keys")
        target[last] = value
        given[key] = override
    return validate(values, Recipe, lambda location: f"--set {_blamed(given, location)}", "recipe", HINT)


def _check_key(key: str) -> None:
    section: type[BaseModel] | None = Recipe
    for depth, part in enumerate(parts := key.split(".")):
        if section is None:
            raise HpctrainError(f"--set {key}: {'.'.join(parts[:depth])} is a value and has no keys")
        if part not in section.model_fields:
            raise HpctrainError(f"--set {key}: unknown key {part!r}", nearest(part, section.model_fields))
        section = subsection(section, part)


def _blamed(given: dict[str, str], location: Location) -> str:
    """The override that a fault came from; all of them where it is about how keys go together."""
    dotted = ".".join(map(str, location))
    for key, override in given.items():
        if dotted == key or dotted.startswith(f"{key}."):
            return override
    return " --set ".join(given.values())
