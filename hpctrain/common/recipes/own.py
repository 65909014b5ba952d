"""Writes a commented recipe for data of one's own, whose values follow stated rules from what the data are."""

from __future__ import annotations

import math
from dataclasses import dataclass
from importlib import resources

from hpctrain.common.files.checked_yaml import dump

LARGE = 100_000
"""Training images from which on a recipe is written for a large data set."""


@dataclass(frozen=True, kw_only=True)
class OwnImages:
    """A data set of images.

    Attributes:
        train, val: the numbers of images.
        side: the median of the shorter sides of some training images, in pixels.
    """

    classes: int
    train: int
    val: int
    side: int


@dataclass(frozen=True, kw_only=True)
class OwnText:
    """A data set of tokens; ``train`` and ``val`` are their numbers."""

    vocabulary: int
    train: int
    val: int


@dataclass(frozen=True, kw_only=True)
class OwnWeights:
    """What a network begins with.

    Attributes:
        model: the name of the network that they are of.
    """

    path: str
    model: str


def own_recipe(name: str, data: OwnImages | OwnText, path: str, weights: OwnWeights | None = None) -> str:
    """The text of a recipe.

    Args:
        path: the folder of the shards or tokens, which may still have to be made.
        weights: what a network of images is to begin with.
    """
    # Imported here because it takes longer than the rest.
    from jinja2 import Environment, StrictUndefined

    kind, much = ("text", 10**9) if isinstance(data, OwnText) else ("images", LARGE)
    template = (resources.files("hpctrain.common.recipes") / f"own_{kind}.j2").read_text()
    size = min(224, max(32, data.side // 32 * 32)) if isinstance(data, OwnImages) else 0
    return (
        Environment(undefined=StrictUndefined, keep_trailing_newline=True, autoescape=False)  # noqa: S701 - YAML
        .from_string(template)
        .render(
            name=name,
            data=data,
            path=path,
            weights=weights,
            large=data.train >= much,
            many=LARGE,
            size=size,
            line=lambda key, value: dump({key: value}).rstrip("\n"),
            power_of_two=_power_of_two,
        )
    )


def _power_of_two(number: float, most: int) -> int:
    """The largest power of two up to a number, within 8 and a larger one."""
    return min(most, max(8, 1 << int(math.log2(max(1, number)))))
