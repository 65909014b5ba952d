"""A recipe's loss in training, described once for both frameworks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from hpctrain.common.recipes.schema import Recipe


@dataclass(frozen=True, kw_only=True)
class RecipeLoss:
    """A recipe's loss in training.

    Label smoothing is PyTorch's: the mean over all classes, the label's own included, has the part ``smoothing`` in it.
    """

    name: str
    smoothing: float
    threshold: float | None

    @classmethod
    def of(cls, recipe: Recipe) -> Self:
        """The recipe's."""
        return cls(name=recipe.loss, smoothing=recipe.label_smoothing, threshold=recipe.target_threshold)
