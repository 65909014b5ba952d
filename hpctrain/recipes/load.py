"""Recipe files and ``--set`` overrides, checked against the schema."""

from __future__ import annotations

import json
import re
import reprlib
from collections.abc import Callable, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError
from pydantic_core import ErrorDetails

from hpctrain.bounded_yaml import BoundedLoader
from hpctrain.errors import HpctrainError, nearest
from hpctrain.recipes.schema import Recipe, Section

Location = tuple[int | str, ...]


class _Loader(BoundedLoader):
    """The decimal numbers of YAML 1.2: ``1e-4`` is one, and ``1:30``, ``0x1f``, ``1_000`` and dates are none. Aliases,
    which can be circular or grow without bounds, and tags have no use in a recipe.
    """

    # Sections within sections, and lists in them: a recipe has three levels.
    deepest = 20

    def refusal(self, event: Any) -> str | None:
        if isinstance(event, yaml.AliasEvent):
            return f"the alias *{event.anchor} has no place in a recipe"
        tag = getattr(event, "tag", None)
        return f"the tag {tag} has no place in a recipe" if tag else None


_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag.rpartition(":")[2] not in ("timestamp", "int", "float")]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
# At most 18 digits, which no number of a recipe needs: Python refuses to read thousands of them.
_Loader.add_implicit_resolver("tag:yaml.org,2002:int", re.compile(r"[-+]?(0|[1-9][0-9]{0,17})\Z"), list("-+0123456789"))
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(
        r"[-+]?((\.[0-9]+|[0-9]+\.[0-9]*)([eE][-+]?[0-9]+)?|[0-9]+[eE][-+]?[0-9]+|\.(inf|Inf|INF))\Z|\.(nan|NaN|NAN)\Z"
    ),
    list("-+.0123456789"),
)


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
    try:
        text = path.read_text()
    except OSError as error:
        names = ", ".join(recipe_names())
        raise HpctrainError(
            f"cannot read the recipe {path}: {error.strerror}", f"the published recipes go by their name: {names}"
        ) from error
    except UnicodeDecodeError as error:
        raise HpctrainError(f"{path} is not a text file, so it is no recipe") from error
    recipe = _parse(text, path)
    return _override(recipe, overrides) if overrides else recipe


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


def _parse(text: str, path: Path) -> Recipe:
    try:
        root = yaml.compose(text, _Loader)
        values = yaml.load(text, _Loader)  # noqa: S506 - a SafeLoader
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{path}:{mark.line + 1}" if mark else str(path)
        raise HpctrainError(f"{where}: not valid YAML: {getattr(error, 'problem', error)}") from error
    if root is None or not isinstance(values, dict):
        raise HpctrainError(f"{path} holds no recipe: its top level is not a mapping of keys to values")
    _refuse_duplicates(root, path)
    return _validate(values, lambda location: f"{path}:{_line(root, location)}")


def _refuse_duplicates(node: yaml.Node, path: Path) -> None:
    """YAML forbids a key that is given twice; PyYAML takes the last in silence."""
    if not isinstance(node, yaml.MappingNode):
        return
    seen: dict[str, int] = {}
    for key, value in node.value:
        line = key.start_mark.line + 1
        if key.value in seen:
            raise HpctrainError(f"{path}:{line}: the key {key.value!r} was given before, in line {seen[key.value]}")
        seen[key.value] = line
        _refuse_duplicates(value, path)


def _line(node: yaml.Node, location: Location) -> int:
    """The line of the deepest part of ``location`` that the file holds, from 1."""
    line = node.start_mark.line
    for part in location:
        if isinstance(node, yaml.MappingNode):
            found = [pair for pair in node.value if pair[0].value == part]
            if not found:
                break
            line, node = found[0][0].start_mark.line, found[0][1]
        else:
            break
    return int(line) + 1


def _override(recipe: Recipe, overrides: Sequence[str]) -> Recipe:
    values = recipe.model_dump(mode="json")
    given: dict[str, str] = {}
    for override in overrides:
        key, equals, text = override.partition("=")
        if not (key and equals):
            raise HpctrainError(f"--set {override}: not of the form key=value", "for example --set epochs=5")
        *sections, last = key.split(".")
        _check_key(key)
        target = values
        for name in sections:
            target = target[name]
            if not isinstance(target, dict):
                raise HpctrainError(f"--set {override}: {name} was set to {target!r} before, which has no keys")
        try:
            target[last] = yaml.load(text, _Loader)  # noqa: S506 - a SafeLoader
        except yaml.YAMLError as error:
            fault = getattr(error, "problem", error)
            raise HpctrainError(f"--set {override}: the value is not valid YAML: {fault}") from error
        given[key] = override
    return _validate(values, lambda location: f"--set {_blamed(given, location)}")


def _check_key(key: str) -> None:
    section: type[Section] | None = Recipe
    for depth, part in enumerate(parts := key.split(".")):
        if section is None:
            raise HpctrainError(f"--set {key}: {'.'.join(parts[:depth])} is a value and has no keys")
        if part not in section.model_fields:
            raise HpctrainError(f"--set {key}: unknown key {part!r}", nearest(part, section.model_fields))
        section = _subsection(section, part)


def _subsection(section: type[Section], key: str) -> type[Section] | None:
    """The section that lies under a key; None where the key holds a value."""
    annotation = section.model_fields[key].annotation
    return annotation if isinstance(annotation, type) and issubclass(annotation, Section) else None


def _blamed(given: dict[str, str], location: Location) -> str:
    """The override that a fault came from; all of them where it is about how keys go together."""
    dotted = ".".join(map(str, location))
    for key, override in given.items():
        if dotted == key or dotted.startswith(f"{key}."):
            return override
    return " --set ".join(given.values())


def _validate(values: dict[str, Any], where: Callable[[Location], str]) -> Recipe:
    try:
        # As JSON, because only there does pydantic's strict mode take a list for a tuple.
        return Recipe.model_validate_json(json.dumps(values, default=repr))
    except ValidationError as error:
        faults = [f"{where(fault['loc'])}: {_describe(fault)}" for fault in error.errors()]
        raise HpctrainError("\n".join(faults), "hpctrain recipes show digits prints a complete recipe") from error


def _describe(fault: ErrorDetails) -> str:
    *parents, last = fault["loc"] or ("the recipe",)
    key = ".".join(map(str, (*parents, last)))
    match fault["type"]:
        case "extra_forbidden":
            section: type[Section] | None = Recipe
            for part in parents:
                assert section is not None
                section = _subsection(section, str(part))
            assert section is not None
            return f"unknown key {key!r}; {nearest(str(last), section.model_fields)}"
        case "missing":
            return f"the key {key!r} is missing"
        case "value_error":
            return f"{key}: {fault['msg'].removeprefix('Value error, ')}"
        case _:
            return f"{key}: {fault['msg'][:1].lower()}{fault['msg'][1:]}, not {reprlib.repr(fault['input'])}"
