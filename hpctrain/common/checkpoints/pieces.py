"""Pieces of arrays: what one rank holds of an array that is divided over ranks, and the key of a piece in a file.

A piece lies under ``NAME[0:2,0:8 of 4,8]``: where it begins and ends along each dimension of the array, and the array's
shape. An array that is whole lies under its name alone, unless that ends as such a key does.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from hpctrain.common.errors import HpctrainError

if TYPE_CHECKING:
    from numpy.typing import NDArray

_NUMBER = "[0-9]{1,18}"
_RANGE = f"{_NUMBER}:{_NUMBER}"
_KEY = re.compile(rf"(.*)\[((?:{_RANGE}(?:,{_RANGE})*)?) of ((?:{_NUMBER}(?:,{_NUMBER})*)?)\]", re.DOTALL)

# Meshes have five dimensions, each of which divides an array once.
_MOST_CUTS = 32
# One takes a microsecond.
_MOST_COMPARED = 10**6


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
        """The place of what a file has under a key, with so many elements along each dimension.

        Raises:
            ValueError: the key is of a piece with others.
        """
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

    Args:
        places: each piece's place, with the name of the file that holds it.

    Raises:
        HpctrainError: names the array, and what has the pieces that are at fault.
    """
    arrays: dict[str, dict[Box, str]] = {}
    shapes: dict[str, tuple[tuple[int, ...], str]] = {}
    for (name, shape, box), where in places:
        first, there = shapes.setdefault(name, (shape, where))
        if shape != first:
            raise HpctrainError(
                "HT-checkpoint-damaged",
                "{name!r} has shape {shape_there} in {there}, and {shape} in {where}",
                exit_code=1,
                name=name,
                shape_there=list(first),
                there=there,
                shape=list(shape),
                where=where,
            )
        boxes = arrays.setdefault(name, {})
        if box in boxes:
            raise HpctrainError(
                "HT-checkpoint-damaged",
                "{name!r} {box} is both in {there} and in {where}",
                exit_code=1,
                name=name,
                box=box,
                there=boxes[box],
                where=where,
            )
        boxes[box] = where
    for name, boxes in arrays.items():
        _check_array(name, shapes[name][0], boxes)


def _check_array(name: str, shape: tuple[int, ...], boxes: Mapping[Box, str]) -> None:
    if two := _overlapping(name, boxes):
        there, where = (f"{box} in {boxes[box]}" for box in two)
        raise HpctrainError(
            "HT-checkpoint-damaged",
            "pieces of {name!r} overlap: {there}, and {where}",
            exit_code=1,
            name=name,
            there=there,
            where=where,
        )
    size, held = math.prod(shape), sum(box.size for box in boxes)
    if held < size:
        found = ", ".join(f"{box} in {where}" for box, where in sorted(boxes.items())[:4])
        further = f" and {len(boxes) - 4} more" if len(boxes) > 4 else ""
        raise HpctrainError(
            "HT-checkpoint-damaged",
            "{missing} of the {size} elements of {name!r}, of shape {shape}, are missing: there is only "
            "{found}{further}",
            exit_code=1,
            missing=size - held,
            size=size,
            name=name,
            shape=list(shape),
            found=found,
            further=further,
        )


def _overlapping(name: str, boxes: Collection[Box]) -> tuple[Box, Box] | None:
    """Two boxes of one array with a common element; None without.

    Meshes cut arrays from end to end, along one dimension after the other. Boxes that such cuts part have nothing in
    common, so that the others alone, which overlap or were made by hand, are compared with each other.

    Raises:
        HpctrainError: so many are left that it would take too long.
    """
    groups = [[box for box in boxes if box.size]]
    begins = zip(*(box.offsets for box in groups[0]), strict=True)
    divided = [axis for axis, offsets in enumerate(begins) if len(set(offsets)) > 1]
    for axis in itertools.islice(itertools.cycle(divided), _MOST_CUTS):
        groups = [part for group in groups for part in _parted(group, axis) if len(part) > 1]
    pairs = (pair for group in groups for pair in itertools.combinations(group, 2))
    for one, other in itertools.islice(pairs, _MOST_COMPARED):
        if one.common(other):
            return one, other
    if next(pairs, None):
        raise HpctrainError(
            "HT-checkpoint-damaged",
            "{name!r} has pieces that lie as those of no mesh, too many to compare them: {count}",
            exit_code=1,
            name=name,
            count=sum(map(len, groups)),
        )
    return None


def _parted(boxes: Iterable[Box], axis: int) -> list[list[Box]]:
    """The boxes of each part of the array, where it is cut along a dimension wherever no box lies across."""
    parts: list[list[Box]] = []
    reached = -1
    for box in sorted(boxes, key=lambda box: box.offsets[axis]):
        if (begin := box.offsets[axis]) >= reached:
            parts.append([])
        parts[-1].append(box)
        reached = max(reached, begin + box.lengths[axis])
    return parts
