"""Arrays that are cut into boxes at random, and given to ranks at random."""

from __future__ import annotations

from collections.abc import Mapping
from random import Random

import numpy as np

from hpctrain.common.checkpoints.pieces import Box, Piece

Held = list[dict[str, list[Box]]]


def cut(box: Box, random: Random, times: int) -> list[Box]:
    """Boxes that make up ``box``: a random one of them is cut in two, again and again."""
    boxes = [box]
    for _ in range(times):
        chosen = boxes.pop(random.randrange(len(boxes)))
        long = [axis for axis, length in enumerate(chosen.lengths) if length > 1]
        if not long:
            boxes.append(chosen)
            continue
        axis = random.choice(long)
        at = random.randrange(1, chosen.lengths[axis])
        offsets, lengths = list(chosen.offsets), list(chosen.lengths)
        lengths[axis] = at
        boxes.append(Box(chosen.offsets, tuple(lengths)))
        offsets[axis], lengths[axis] = offsets[axis] + at, chosen.lengths[axis] - at
        boxes.append(Box(tuple(offsets), tuple(lengths)))
    return boxes


def held_by(arrays: Mapping[str, np.ndarray], ranks: int, random: Random) -> Held:
    """By rank, which boxes it has of each array. Each box is one rank's, or several have it alike."""
    held: Held = [{name: [] for name in arrays} for _ in range(ranks)]
    for name, array in arrays.items():
        for box in cut(Box.whole(array.shape), random, random.randrange(6)):
            for rank in random.sample(range(ranks), random.randint(1, ranks)):
                held[rank][name].append(box)
    return held


def pieces(arrays: Mapping[str, np.ndarray], held: Mapping[str, list[Box]]) -> dict[str, list[Piece]]:
    """What a rank gives of them to a checkpoint."""
    return {
        name: [
            Piece(shape=array.shape, box=box, nbytes=box.size * array.itemsize, array=lambda a=array, b=box: part(a, b))
            for box in held[name]
        ]
        for name, array in arrays.items()
    }


def part(array: np.ndarray, box: Box) -> np.ndarray:
    return array[tuple(slice(begin, begin + length) for begin, length in zip(box.offsets, box.lengths, strict=True))]
