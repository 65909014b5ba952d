"""Pieces of arrays: what one rank holds of an array that is divided over ranks, and the key of a piece in a file.

A piece lies under ``NAME[0:2,0:8 of 4,8]``: where it begins and ends along each dimension of the array, and the array's
shape. An array that is whole lies under its name alone, unless that ends as such a key does.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from hpctrain.common.errors import HpctrainError

if TYPE_CHECKING:
    from numpy.typing import NDArray

_NUMBER = "[0-9]{1,18}"
_RANGE = f"{_NUMBER}:{_NUMBER}"
_KEY = re.compile(rf"(.*)\[((?:{_RANGE}(?:,{_RANGE})*)?) of ((?:{_NUMBER}(?:,{_NUMBER})*)?)\]", re.DOTALL)

# Pieces of a mesh make a grid with about as many cells as there are pieces.
_MOST_CELLS = 10**7


def damaged(where: Path | str, problem: str) -> HpctrainError:
    """The error for a checkpoint that is not what was written, or that nobody can have written."""
    return HpctrainError("HT-checkpoint-damaged", "{where}: {problem}", exit_code=1, where=where, problem=problem)


class Box(NamedTuple):
    """A rectangular part of an array: where it begins, and how long it is, along each dimension."""

    offsets: tuple[int, ...]
    lengths: tuple[int, ...]

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Box:
        """The box of all elements of an array."""
        return cls((0,) * len(shape), tuple(shape))

    @property
    def size(self) -> int:
        """How many elements it has."""
        return math.prod(self.lengths)

    @property
    def ends(self) -> tuple[int, ...]:
        """The index behind its last element, along each dimension."""
        return tuple(offset + length for offset, length in zip(self.offsets, self.lengths, strict=True))

    def lies_in(self, shape: Sequence[int]) -> bool:
        """Whether an array of this shape contains the box."""
        return len(shape) == len(self.offsets) and all(end <= size for end, size in zip(self.ends, shape, strict=True))

    def common(self, other: Box) -> Box | None:
        """The intersection with another box of the same array; None if it is empty."""
        offsets = tuple(map(max, self.offsets, other.offsets))
        lengths = tuple(end - offset for end, offset in zip(map(min, self.ends, other.ends), offsets, strict=True))
        return Box(offsets, lengths) if all(length > 0 for length in lengths) else None

    def within(self, other: Box) -> tuple[slice, ...]:
        """The box relative to ``other``, which contains it."""
        begins = [own - begin for own, begin in zip(self.offsets, other.offsets, strict=True)]
        return tuple(slice(begin, begin + length) for begin, length in zip(begins, self.lengths, strict=True))

    def __str__(self) -> str:
        return f"[{', '.join(f'{begin}:{end}' for begin, end in zip(self.offsets, self.ends, strict=True))}]"


class Place(NamedTuple):
    """Whose elements a piece has: the name and the shape of the whole array, and which of it."""

    name: str
    shape: tuple[int, ...]
    box: Box

    @property
    def key(self) -> str:
        """The key of the piece in a file."""
        if self.box == Box.whole(self.shape) and not _KEY.fullmatch(self.name):
            return self.name
        ranges = (f"{begin}:{end}" for begin, end in zip(self.box.offsets, self.box.ends, strict=True))
        return f"{self.name}[{','.join(ranges)} of {','.join(map(str, self.shape))}]"

    @classmethod
    def of(cls, key: str, lengths: tuple[int, ...]) -> Place:
        """The place of what a file has under a key, with so many elements along each dimension."""
        if not (match := _KEY.fullmatch(key)):
            return cls(key, lengths, Box.whole(lengths))
        name, ranges, sizes = match.groups()
        bounds = [tuple(map(int, each.split(":"))) for each in ranges.split(",") if each]
        shape = tuple(int(size) for size in sizes.split(",") if size)
        box = Box(tuple(begin for begin, _ in bounds), lengths)
        if len(bounds) != len(lengths) or box.ends != tuple(end for _, end in bounds) or not box.lies_in(shape):
            raise ValueError(f"{key!r} has {' x '.join(map(str, lengths)) or 'one'} elements there")
        return cls(name, shape, box)


@dataclass(frozen=True, kw_only=True)
class Piece:
    """What a rank holds of an array that is divided over ranks, or that only some of them hold.

    Attributes:
        shape: the shape of the whole array, not of the piece.
        array: makes an array of them, of the box's lengths; it may be the one that training goes on in.
    """

    shape: tuple[int, ...]
    box: Box
    nbytes: int
    array: Callable[[], NDArray[Any]]


def check_cover(places: Iterable[tuple[Place, str]]) -> None:
    """Refuse pieces that do not make whole arrays, each of whose elements is there once.

    Raises:
    """
    arrays: dict[str, list[tuple[Box, str]]] = {}
    shapes: dict[str, tuple[tuple[int, ...], str]] = {}
    for (name, shape, box), where in places:
        first, there = shapes.setdefault(name, (shape, where))
        if shape != first:
            raise damaged(where, f"{name!r} has shape {list(shape)}, and {list(first)} in {there}")
        arrays.setdefault(name, []).append((box, where))
    for name, boxes in arrays.items():
        _check_array(name, shapes[name][0], boxes)


def _check_array(name: str, shape: tuple[int, ...], boxes: Sequence[tuple[Box, str]]) -> None:
    """Count in how many boxes each cell of the grid is that all their edges make together."""
    import numpy as np

    edges = [
        sorted({0, size, *(edge for box, _ in boxes for edge in (box.offsets[axis], box.ends[axis]))})
        for axis, size in enumerate(shape)
    ]
    lengths = [len(along) - 1 for along in edges]
    if math.prod(lengths) > _MOST_CELLS:
        raise damaged(boxes[0][1], f"{name!r} has {len(boxes)} pieces that lie as those of no mesh")
    numbers = [{edge: number for number, edge in enumerate(along)} for along in edges]
    times = np.zeros(lengths, np.int32)
    for box, _ in boxes:
        bounds = zip(numbers, box.offsets, box.ends, strict=True)
        times[tuple(slice(number[begin], number[end]) for number, begin, end in bounds)] += 1
    if (times == 1).all():
        return
    cell = np.unravel_index(np.argmax(times != 1), times.shape)
    offsets = tuple(along[number] for along, number in zip(edges, cell, strict=True))
    ends = tuple(along[number + 1] for along, number in zip(edges, cell, strict=True))
    part = Box(offsets, tuple(end - begin for begin, end in zip(offsets, ends, strict=True)))
    held = [(box, where) for box, where in boxes if box.common(part)] or boxes
    raise HpctrainError(
        "HT-checkpoint-damaged",
        "{name!r}, of shape {shape}: {part} is there {times} times, and not once: {pieces}",
        exit_code=1,
        name=name,
        shape=list(shape),
        part=part,
        times=int(times[cell]),
        pieces=", ".join(f"{box} in {where}" for box, where in held[:4]),
    )
