"""Recipe files and ``--set`` overrides, checked against the schema."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hpctrain.common.errors import HpctrainError
from hpctrain.common.files.checked_yaml import Location, parse_value, validate
from hpctrain.common.recipes.difference import deciding_differences
from hpctrain.common.recipes.entries import HINT, load_entry
from hpctrain.common.recipes.mesh import parse_mesh
from hpctrain.common.recipes.schema import Recipe


def load_recipe(name_or_path: str, overrides: Sequence[str] = ()) -> Recipe:
    """Load a recipe, with ``key=value`` overrides.

    Args:
        name_or_path: a recipe's name or file, see :func:`~hpctrain.common.recipes.entries.load_entry`.
        overrides: ``optimizer.learning_rate=0.2`` each; the value is YAML.

    Raises:
        HpctrainError: no such recipe, or something in it or in an override that the schema refuses; names the file,
            the line and the key.
    """
    recipe = load_entry(name_or_path)
    return override_recipe(recipe, overrides) if overrides else recipe


def mesh_overrides(mesh: str | None) -> list[str]:
    """The overrides of a recipe that ``--mesh`` stands for."""
    return [f"mesh.{size}" for size in parse_mesh(mesh).option.split(",")] if mesh is not None else []


def override_recipe(recipe: Recipe, overrides: Sequence[str]) -> Recipe:
    """Override values of a recipe; arguments and errors are those of :func:`load_recipe`.

    A run of fewer epochs clips the warm-up, which ``notes`` then says. Reported results are of other values once one
    is changed that decides them.
    """
    values = recipe.model_dump(mode="json")
    found = _validated(values, _set(values, overrides))
    return _of_other_values(found) if deciding_differences(recipe, found) else found


def require_no_overrides(script: str, overrides: Sequence[str]) -> None:
    """Refuse ``--set`` for a script.

    Raises:
        HpctrainError: there is one.
    """
    if overrides:
        raise HpctrainError(
            "HT-option-not-usable-here",
            "--set {key} is for recipes, and {script} is a script",
            "its arguments go after --",
            key=overrides[0].partition("=")[0],
            script=script,
        )


def _set(values: dict[str, Any], overrides: Sequence[str]) -> dict[str, str]:
    """Put overrides into a recipe's values; returns them by their keys."""
    given: dict[str, str] = {}
    for override in overrides:
        key, equals, text = override.partition("=")
        if not (key and equals):
            raise HpctrainError(
                "HT-option-bad-value",
                "--set {override}: not of the form key=value",
                "for example --set epochs=5",
                override=override,
            )
        value = parse_value(text, f"--set {override}")
        *sections, last = key.split(".")
        target = values
        for name in sections:
            if target.get(name) is None:
                target[name] = {}
            target = target[name]
            if not isinstance(target, dict):
                raise HpctrainError(
                    "HT-set-unknown-key",
                    "--set {override}: {parent} is {value!r}, which has no keys",
                    override=override,
                    parent=name,
                    value=target,
                )
        target[last] = value
        given[key] = override
    return given


def _validated(values: dict[str, Any], given: dict[str, str]) -> Recipe:
    values["notes"] = _clip_warmup(values, given)
    return validate(values, Recipe, lambda location: f"--set {_blamed(given, location)}", "recipe", HINT)


def _clip_warmup(values: dict[str, Any], given: dict[str, str]) -> list[str]:
    """Let the warm-up be no longer than a run whose epochs alone were changed; returns what is to be said of that."""
    epochs, schedule = values.get("epochs"), values.get("schedule")
    if "epochs" not in given or not isinstance(epochs, int) or epochs < 1 or not isinstance(schedule, dict):
        return []
    warmup = schedule.get("warmup_epochs")
    if {"schedule", "schedule.warmup_epochs"} & given.keys() or not isinstance(warmup, float | int) or warmup <= epochs:
        return []
    schedule["warmup_epochs"] = epochs
    return [
        f"--set epochs={epochs}: the warm-up of {warmup:g} epochs is clipped to the whole run; "
        "--set schedule.warmup_epochs=0 does without"
    ]


def _of_other_values(recipe: Recipe) -> Recipe:
    rows = tuple(row.model_copy(update={"of_other_values": True}) for row in recipe.reported)
    return recipe.model_copy(update={"reported": rows})


def _blamed(given: dict[str, str], location: Location) -> str:
    """The override that a fault came from; where it is about how keys go together, those of their section, or all."""
    dotted = ".".join(map(str, location))
    for key, override in given.items():
        if dotted == key or dotted.startswith(f"{key}."):
            return override
    within = [override for key, override in given.items() if key.startswith(f"{dotted}.")]
    return " --set ".join(within or given.values())
