"""A recipe's loss in training, described once for both frameworks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from hpctrain.common.recipes.schema import Recipe


@dataclass(frozen=True, kw_only=True)
class RecipeLoss:
    """A recipe's loss in training.

    Labels are smoothed as PyTorch does it: ``smoothing`` of a label is spread over all classes, its own included.
    """

    name: str
    smoothing: float
    threshold: float | None

    @classmethod
    def of(cls, recipe: Recipe) -> Self:
        """The loss that a recipe asks for."""
        return cls(name=recipe.loss, smoothing=recipe.label_smoothing, threshold=recipe.target_threshold)
