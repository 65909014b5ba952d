"""Recipe files: published ones and others, with their variants."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from importlib import resources
from pathlib import Path
from typing import Any

from hpctrain.common.errors import HpctrainError, nearest
from hpctrain.common.files.checked_yaml import LONGEST_FILE, Document, Location, read_document, validate
from hpctrain.common.files.printable import shell_word
from hpctrain.common.files.regular import read_text
from hpctrain.common.recipes.schema import Recipe

HINT = "hpctrain recipes show digits prints a complete recipe"


def all_entries() -> Iterator[Recipe]:
    """Every published recipe in each of its variants; ``load_entry(entry.name)`` loads the same."""
    for name in recipe_names():
        document = _document(find(name)[0])
        for variant in _variants(document) or ("",):
            yield _entry(document, variant)


def variant_names(name_or_path: str) -> tuple[str, ...]:
    """The variants of a recipe file, the one first that is meant without ``@``; none where it has none or one is named.

    Raises:
        HpctrainError: no such recipe, or no recipe in the file.
    """
    path, variant = find(name_or_path)
    return () if variant else tuple(_variants(_document(path)))


def find(name_or_path: str) -> tuple[Path, str]:
    """The file, and the variant that was asked for, or an empty string. The file is not read.

    Raises:
        HpctrainError: no published recipe has this name.
    """
    name, _, variant = name_or_path.rpartition("@") if "@" in name_or_path else (name_or_path, "", "")
    if "/" in name_or_path or name.endswith((".yaml", ".yml")):
        _refuse_folder(name_or_path)
        # A path may itself contain an @.
        whole = not variant or os.path.exists(name_or_path)  # noqa: PTH110 - Path.exists raises for over-long names
        return (Path(name_or_path), "") if whole else (Path(name), variant)
    names = recipe_names()
    if name not in names:
        _refuse_folder(name_or_path)
        beside = [file for file in (f"{name}.py", f"{name}.yaml", f"{name}.yml") if os.path.isfile(file)]  # noqa: PTH113
        meant = f"did you mean {beside[0]!r}? valid: {', '.join(names)}" if beside else nearest(name, names)
        raise HpctrainError(
            "HT-recipe-unknown",
            "unknown recipe {name!r}",
            f"{meant}; or the path of a .yaml or .py file",
            name=name,
        )
    with resources.as_file(resources.files("hpctrain.common.recipes") / f"{name}.yaml") as path:
        return path, variant


def _refuse_folder(path: str) -> None:
    if not os.path.isdir(path):  # noqa: PTH112 - Path.is_dir raises for over-long names
        return
    word = shell_word(path)
    is_run = os.path.isfile(os.path.join(path, "plan.json"))  # noqa: PTH113, PTH118
    hint = f"to train on a folder of images: hpctrain data shard {word} SHARDS, and --set data.path=SHARDS for a recipe"
    if is_run:
        hint = f"it is a run's: hpctrain run --resume --run-dir {word} continues it"
    raise HpctrainError("HT-work-not-a-script", "{path} is a folder, and no recipe or script", hint, path=path)


def load_entry(name_or_path: str) -> Recipe:
    """Load a published recipe by its name, or a recipe file by its path.

    Args:
        name_or_path: a published name, or a path (it holds a slash or ends in .yaml or .yml), each with
            ``@VARIANT`` after it for another variant than the file's first.

    Raises:
        HpctrainError: no such recipe or variant, or something in it that the schema refuses; names the file, the line
            and the key.
    """
    path, variant = find(name_or_path)
    document = _document(path)
    variants = _variants(document)
    if variant and variant not in variants:
        name = name_or_path.removesuffix(f"@{variant}")
        choices = nearest(variant, variants) if variants else f"{name} has no variants"
        raise HpctrainError(
            "HT-recipe-unknown",
            "unknown variant {variant!r} of {recipe}",
            choices,
            variant=variant,
            recipe=name,
        )
    return _entry(document, variant or next(iter(variants), ""))


def _entry(document: Document, variant: str) -> Recipe:
    """The values of the file, in one of its variants."""
    changes = _variants(document).get(variant, {})
    values = _merged({key: value for key, value in document.values.items() if key != "variants"}, changes)
    if variant and isinstance(values.get("name"), str):
        values["name"] = f"{values['name']}@{variant}"
    return validate(values, Recipe, _where(document, variant, changes), "recipe", HINT)


def _document(path: Path) -> Document:
    hint = f"the published recipes go by their name: {', '.join(recipe_names())}"
    text = read_text(path, "recipe", hint, limit=LONGEST_FILE)
    return read_document(text, path, "recipe")


def _variants(document: Document) -> dict[str, dict[str, Any]]:
    """The changes of each variant; a batch size as a variant's name is a number in YAML."""
    variants = document.values.get("variants", {})
    if not isinstance(variants, dict) or not all(isinstance(changes, dict) for changes in variants.values()):
        raise HpctrainError(
            "HT-recipe-file-not-valid",
            "{where}: variants is not a mapping from names to the values that they change",
            HINT,
            where=document.where(("variants",)),
        )
    return {str(name): changes for name, changes in variants.items()}


def _merged(base: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """The base with the changes: sections key by key, values and lists as a whole."""
    merged = dict(base)
    for key, value in changes.items():
        old = merged.get(key)
        merged[key] = _merged(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
    return merged


def _where(document: Document, variant: str, changes: dict[str, Any]) -> Callable[[Location], str]:
    """Says where the value at a location was given: by the variant if it has a part in it, else by the file's base."""

    def where(location: Location) -> str:
        given: Any = changes
        for part in location:
            if not isinstance(given, dict):
                break
            if part not in given:
                return document.where(location)
            given = given[part]
        return f"{document.where(('variants', variant, *location))}: variant {variant}"

    return where if variant else document.where


def recipe_names() -> list[str]:
    """The names of the published recipes, without their variants."""
    files = resources.files("hpctrain.common.recipes").iterdir()
    return sorted(file.name.removesuffix(".yaml") for file in files if file.name.endswith(".yaml"))
