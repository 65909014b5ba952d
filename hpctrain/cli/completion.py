"""Shell completion. It reads names only and no file contents, so that it answers while the user types."""

from __future__ import annotations

from collections.abc import Callable, Iterable


def _beginning(names: Callable[[], Iterable[str]]) -> Callable[[str], list[str]]:
    def complete(incomplete: str) -> list[str]:
        return [name for name in names() if name.startswith(incomplete)]

    return complete


def _recipes() -> Iterable[str]:
    from hpctrain.common.recipes.names import recipe_names

    return recipe_names()


def _backends() -> Iterable[str]:
    from hpctrain.common.cluster.backends import BACKENDS

    return BACKENDS


def _clusters() -> Iterable[str]:
    from hpctrain.control.schedulers.profiles import profile_names

    return ["auto", *profile_names()]


recipes, backends, clusters = map(_beginning, (_recipes, _backends, _clusters))
