"""The schema of augmentation: random changes to photographs, batches and labels, and averaging of parameters."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from hpctrain.common.files.checked_yaml import Section
from hpctrain.common.recipes.keys import CheckedSection, Count, Fraction, NotNegative, Of, Positive

Probability = Annotated[float, Field(gt=0, le=1)]
Level = Annotated[int, Field(ge=0, le=255)]
_RANDOM = Of("name", "rand_augment_increasing")


class Augmentation(CheckedSection):
    """Random operations on a photograph that was cropped and flipped; see hpctrain.worker.data.augment."""

    name: Literal["trivial_augment_wide", "rand_augment_increasing"] = Field(
        description="one operation of 14 with a random magnitude (Müller and Hutter 2021, torchvision's "
        "TrivialAugmentWide), or layers of 15, each applied with probability 0.5 (timm's rand-…-inc1)"
    )
    layers: Annotated[Count, _RANDOM] = Field(2, description="operations that are drawn for each photograph")
    magnitude: Annotated[float, Field(ge=0, le=10), _RANDOM] = Field(9.0, description="of each operation, 0 to 10")
    deviation: Annotated[NotNegative, _RANDOM] = Field(
        0.0, description="standard deviation of the magnitude between operations"
    )
    interpolation: Literal["nearest", "bilinear", "bicubic"] = Field("bilinear", description="of moved pixels")
    fill: tuple[Level, Level, Level] = Field(
        (0, 0, 0), description="red, green and blue of pixels that nothing is moved to"
    )


class Erasing(CheckedSection):
    """A random rectangle gets the mean colour, which is 0 once normalised (Zhong et al. 2017, arXiv 1708.04896)."""

    probability: Probability = Field(description="of an image")
    area: tuple[Positive, Positive] = Field((0.02, 0.33), description="share of the image's area")
    ratio: tuple[Positive, Positive] = Field((0.3, 3.3), description="height over width")

    def faults(self) -> Iterator[str]:
        if not self.area[0] <= self.area[1] <= 1:
            yield "area is a smallest and a largest share, at most 1"
        if self.ratio[0] > self.ratio[1]:
            yield "ratio is a smallest and a largest one"


class Mixing(CheckedSection):
    """Each image is mixed with the one before it in its group, and the labels alike (torchvision, timm; torch only).

    Where both kinds are given, each group draws one of them, with equal probability. Groups are cut from the global
    batch in its order, whatever ranks there are, so that the numbers do not depend on the ranks: a rank also loads
    the image that its first one is mixed with where the two are not on the same rank.
    """

    mixup: Positive | None = Field(
        None,
        description="alpha: lam a + (1 - lam) b, lam from Beta(alpha, alpha) (Zhang et al. 2017, arXiv 1710.09412)",
    )
    cutmix: Positive | None = Field(
        None, description="alpha: a rectangle of b in a, 1 - lam of its area (Yun et al. 2019, arXiv 1905.04899)"
    )
    group: Count | None = Field(
        None,
        description="samples of a step that share one draw, in the sources what one process computes at once; by "
        "default all of the step",
    )

    def faults(self) -> Iterator[str]:
        if self.mixup is None and self.cutmix is None:
            yield "mixing needs mixup, cutmix or both"


class Averaging(Section):
    """An exponential moving average of the parameters (torch only). Validation and export use the average.

    Statistics of batch normalisation are averaged alike. A step whose update is left out does not enter.
    """

    decay: Fraction = Field(description="share of the average that is kept at each update")
    every: Count = Field(1, description="steps from one update to the next; the first is at an epoch's first step")
    adjusted: bool = Field(
        False, description="1 - decay is multiplied by batch.size x every / epochs, up to 1 (pycls, torchvision)"
    )
    begin_epoch: NotNegative = Field(
        0, description="epochs, at least, during which the average is a copy (torchvision: those of the warm-up)"
    )

    def weight(self, *, epoch: int, step: int, batch: int, epochs: int) -> float | None:
        """The weight of the parameters in the update of their average after a step; None if it is not updated.

        Args:
            epoch, step: the epoch of the run and the step of the epoch, both from 0.
            batch: samples of one step over all ranks.
        """
        if step % self.every:
            return None
        begin = math.ceil(self.begin_epoch)
        if epoch < begin or (epoch, step) == (begin, 0):
            return 1.0
        return min(1.0, (1 - self.decay) * (batch * self.every / epochs if self.adjusted else 1))
