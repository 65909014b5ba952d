"""Mixup and CutMix: the images of a global batch that are mixed, and their shares.

What is drawn depends on the seed, the epoch and the group's place in the epoch alone, and partners are found in the
global batch: a run on other ranks, or in other micro-batches, mixes the same.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hpctrain.common.recipes.augmentation import Mixing
from hpctrain.worker.data.sampling import Indices, cut

# The last word of a group's counter. Those of samples have their repetition there, see hpctrain.worker.data.decoder.
_OF_A_GROUP = 2**64 - 1


@dataclass(frozen=True, kw_only=True)
class Mixture:
    """How the first N of M images are mixed with others of them.

    Image i becomes ``own[i] x image i + other[i] x image partners[i]``, or within its box image partners[i] alone; its
    label becomes ``label[i]`` parts of its own and 1 - ``label[i]`` of its partner's.

    Attributes:
        partners: int64, shape (N,), each below M.
        own, other: float32, shape (N,).
        label: float32, shape (N,).
        boxes: int64, shape (N, 4): top, bottom, left and right; empty for mixup.
    """

    partners: Indices
    own: NDArray[np.float32]
    other: NDArray[np.float32]
    label: NDArray[np.float32]
    boxes: Indices


@dataclass(frozen=True, kw_only=True)
class Piece:
    """The samples of a global batch that a rank computes together, and those that they are mixed with.

    Attributes:
        positions: in the batch: of what is computed, then of partners that are not among them.
        partners: for each that is computed, which of ``positions`` its partner is.
        starts: for each that is computed, where in the batch its group begins.
    """

    positions: Indices
    partners: Indices
    starts: Indices


def piece(positions: Indices, length: int, group: int | None) -> Piece:
    """The samples and their partners in a global batch of ``length``.

    The batch is cut into groups of at most ``group``, in the fewest parts that differ by one at most, as over the ranks
    of the sources. The partner of each is the one before it in its group, of the first the last.
    """
    starts, partners = np.empty(length, np.int64), np.empty(length, np.int64)
    for members in cut(np.arange(length), group):
        starts[members], partners[members] = members[0], np.roll(members, 1)
    wanted = partners[positions]
    everything = np.concatenate([positions, np.setdiff1d(wanted, positions)])
    order = np.argsort(everything, kind="stable")
    return Piece(
        positions=everything,
        partners=order[np.searchsorted(everything, wanted, sorter=order)],
        starts=starts[positions],
    )


class Mixer:
    """Draws mixtures.

    Args:
        settings: the recipe's.
        seed: the recipe's.
    """

    def __init__(self, settings: Mixing, seed: int) -> None:
        self._kinds = [
            (alpha, boxed) for alpha, boxed in ((settings.mixup, False), (settings.cutmix, True)) if alpha is not None
        ]
        self._seed = seed

    def mixture(self, part: Piece, epoch: int, first: int, height: int, width: int) -> Mixture:
        """The mixture of a piece.

        Args:
            part: of a global batch.
            epoch: from 0.
            first: samples of the epoch in front of the batch.
            height, width: of the images.
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
        key, counter = (np.array(words, np.uint64) for words in ([self._seed, epoch], [0, 0, place, _OF_A_GROUP]))
        random = np.random.Generator(np.random.Philox(key=key, counter=counter))
        alpha, boxed = self._kinds[int(random.integers(len(self._kinds)))]
        lam = float(random.beta(alpha, alpha))
        if not boxed:
            return lam, lam, (0, 0, 0, 0)
        box = cutmix_box(lam, height, width, int(random.integers(height)), int(random.integers(width)))
        top, bottom, left, right = box
        return 1.0, 1 - (bottom - top) * (right - left) / (height * width), box


def cutmix_box(lam: float, height: int, width: int, y: int, x: int) -> tuple[int, int, int, int]:
    """Top, bottom, left and right of a box of 1 - ``lam`` of an image, cut off at its edges (Yun et al. 2019).

    Args:
        y, x: its middle.
    """
    half = 0.5 * math.sqrt(1 - lam)
    tall, wide = int(half * height), int(half * width)
    return max(y - tall, 0), min(y + tall, height), max(x - wide, 0), min(x + wide, width)
