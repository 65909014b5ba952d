"""The names of the published recipes. By itself, so that a shell need not wait for more when it completes one."""

from __future__ import annotations

from importlib import resources


def recipe_names() -> list[str]:
    """The names of the published recipes, without their variants."""
    files = resources.files("hpctrain.common.recipes").iterdir()
    return sorted(file.name.removesuffix(".yaml") for file in files if file.name.endswith(".yaml"))
