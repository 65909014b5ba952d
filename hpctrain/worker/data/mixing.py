"""Mixup and CutMix: which images of a global batch are mixed, and in which shares.

The shares depend only on the seed, the epoch and the group's place in the epoch, and the partners on the global batch:
a run on other ranks, or in other micro-batches, mixes the same.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hpctrain.common.recipes.augmentation import Mixing
from hpctrain.worker.data.sampling import Indices, cut

# The last word of a group's counter; a sample's is its repetition (see hpctrain.worker.data.decoder).
_GROUP_STREAM = 2**64 - 1


@dataclass(frozen=True, kw_only=True)
class Mixture:
    """How the first N of M images are mixed with others of them.

    Image i becomes ``own[i] x image i + other[i] x image partners[i]``, but image partners[i] within its box; its label
    becomes ``label[i]`` times its own plus 1 - ``label[i]`` times its partner's.

    Attributes:
        partners: int64, shape (N,), each below M.
        own, other, label: float32, shape (N,), each 0 to 1.
        boxes: int64, shape (N, 4): top, bottom, left and right; empty boxes for mixup.
    """

    partners: Indices
    own: NDArray[np.float32]
    other: NDArray[np.float32]
    label: NDArray[np.float32]
    boxes: Indices


@dataclass(frozen=True, kw_only=True)
class MixedSamples:
    """The samples of a global batch that a rank computes together, and those that they are mixed with.

    Attributes:
        positions: the places in the batch of the computed samples, then of partners that are not among them.
        partners: for each computed sample, which of ``positions`` its partner is.
        starts: for each computed sample, where in the batch its group begins.
    """

    positions: Indices
    partners: Indices
    starts: Indices


def piece(positions: Indices, length: int, group: int | None) -> MixedSamples:
    """The samples and their partners in a global batch of ``length``.

    The batch is cut into the fewest groups of at most ``group`` samples, whose sizes differ by one at most, as over the
    ranks of the sources. A sample's partner is the one before it in its group, and the first one's is the last.
    """
    starts, partners = np.empty(length, np.int64), np.empty(length, np.int64)
    for members in cut(np.arange(length), group):
        starts[members], partners[members] = members[0], np.roll(members, 1)
    wanted = partners[positions]
    everything = np.concatenate([positions, np.setdiff1d(wanted, positions)])
    order = np.argsort(everything, kind="stable")
    return MixedSamples(
        positions=everything,
        partners=order[np.searchsorted(everything, wanted, sorter=order)],
        starts=starts[positions],
    )


class Mixer:
    """Draws mixtures for a recipe's settings and seed."""

    def __init__(self, settings: Mixing, seed: int) -> None:
        self._kinds = [
            (alpha, boxed) for alpha, boxed in ((settings.mixup, False), (settings.cutmix, True)) if alpha is not None
        ]
        self._seed = seed

    def mixture(self, part: MixedSamples, epoch: int, first: int, height: int, width: int) -> Mixture:
        """The mixture of a piece.

        Args:
            first: how many samples of the epoch come before the batch.
            height, width: the size of the images in pixels.
        """
        groups, which = np.unique(part.starts, return_inverse=True)
        drawn = [self._drawn(epoch, first + int(start), height, width) for start in groups]
        own, label, boxes = (np.array(each) for each in zip(*drawn, strict=True))
        return Mixture(
            partners=part.partners,
            own=own.astype(np.float32)[which],
            other=(1 - own).astype(np.float32)[which],
            label=label.astype(np.float32)[which],
            boxes=boxes.astype(np.int64).reshape(-1, 4)[which],
        )

    def _drawn(self, epoch: int, place: int, height: int, width: int) -> tuple[float, float, tuple[int, ...]]:
        """Shares of the image and of the label, and the box, of the group that begins at a place of the epoch."""
        key, counter = (np.array(words, np.uint64) for words in ([self._seed, epoch], [0, 0, place, _GROUP_STREAM]))
        random = np.random.Generator(np.random.Philox(key=key, counter=counter))
        alpha, boxed = self._kinds[int(random.integers(len(self._kinds)))]
        lam = float(random.beta(alpha, alpha))
        if not boxed:
            return lam, lam, (0, 0, 0, 0)
        box = cutmix_box(lam, height, width, int(random.integers(height)), int(random.integers(width)))
        top, bottom, left, right = box
        return 1.0, 1 - (bottom - top) * (right - left) / (height * width), box


def cutmix_box(lam: float, height: int, width: int, y: int, x: int) -> tuple[int, int, int, int]:
    """Top, bottom, left and right of a box with 1 - ``lam`` of an image's area (Yun et al. 2019).

    Args:
        y, x: the middle of the box, which is cut off at the image's edges.
    """
    half = 0.5 * math.sqrt(1 - lam)
    tall, wide = int(half * height), int(half * width)
    return max(y - tall, 0), min(y + tall, height), max(x - wide, 0), min(x + wide, width)
