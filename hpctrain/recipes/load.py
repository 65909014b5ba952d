"""Recipe files and ``--set`` overrides, checked against the schema."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import resources
from pathlib import Path

from pydantic import BaseModel

from hpctrain.checked_yaml import Location, load_checked, parse_value, read_text, subsection, validate
from hpctrain.errors import HpctrainError, nearest
from hpctrain.recipes.schema import Recipe

_HINT = "hpctrain recipes show digits prints a complete recipe"


def recipe_names() -> list[str]:
    """The names of the published recipes."""
    files = resources.files("hpctrain.recipes").iterdir()
    return sorted(file.name.removesuffix(".yaml") for file in files if file.name.endswith(".yaml"))


def load_recipe(name_or_path: str, overrides: Sequence[str] = ()) -> Recipe:
    """A published recipe by its name, or any recipe file by its path, with ``key=value`` overrides.

    Args:
        name_or_path: a name of :func:`recipe_names`, or a path (it holds a slash or ends in .yaml or .yml).
        overrides: ``optimizer.learning_rate=0.2`` each; the value is YAML.

    Raises:
        HpctrainError: no such recipe, or something in it or in an override that the schema refuses; names the file,
            the line and the key.
    """
    path = _find(name_or_path)
    text = read_text(path, "recipe", f"the published recipes go by their name: {', '.join(recipe_names())}")
    recipe = load_checked(text, path, Recipe, "recipe", _HINT)
    return override_recipe(recipe, overrides) if overrides else recipe


def _find(name_or_path: str) -> Path:
    if "/" in name_or_path or name_or_path.endswith((".yaml", ".yml")):
        return Path(name_or_path)
    names = recipe_names()
    if name_or_path not in names:
        raise HpctrainError(
            f"unknown recipe {name_or_path!r}", f"{nearest(name_or_path, names)}; or the path of a .yaml or .py file"
        )
    with resources.as_file(resources.files("hpctrain.recipes") / f"{name_or_path}.yaml") as path:
        return path


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
    return validate(values, Recipe, lambda location: f"--set {_blamed(given, location)}", "recipe", _HINT)


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
