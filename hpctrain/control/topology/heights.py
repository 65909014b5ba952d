"""Derives the level of each switch from its cables, which say who is joined and not who is above.

Traffic between hosts climbs and descends again. So a switch stands at the height to which some shortest way between
two leaves climbs at it: its distance to the nearer of the two. In a tree that is its height over its own leaves,
wherever in the tree a leaf hangs; several roots come to the same height, and a lost cable changes none.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hpctrain.control.topology.components import articulation_points, components
from hpctrain.control.topology.fabric import Ints

Mask = NDArray[np.bool_]

# Added to the height of a switch that stands above another of the same height.
_ABOVE = 0.5


def ranks(is_leaf: Mask, source: Ints, target: Ints) -> Ints:
    """The level of each switch: 1 a leaf, above that one more than the highest switch below it; 0 for those on no
    shortest way between two leaves, such as a switch whose hosts are all off.

    Leaves pass nothing on, and cables between them join equals, with one exception: a leaf that alone joins switches
    without hosts stands above them, as a root does on which somebody found a free port for a host. Of two switches of
    the same height on one cable, that with a single switch below it stands above the other.

    Args:
        is_leaf: of each switch: whether hosts make it a leaf.
        source, target: of each directed cable between two switches, both ways.
    """
    passes = ~is_leaf | _joining(is_leaf, source, target)
    climbing = passes[source] | passes[target]
    classes = _classes(is_leaf, passes, source[climbing], target[climbing])
    return _levels(classes, _heights(classes))[classes.of]


@dataclass(frozen=True, kw_only=True)
class _Classes:
    """Switches with the same neighbours, taken together: a large fabric has few different ones.

    Attributes:
        of: the class of each switch.
        size: of each class.
        is_leaf, passes: of each class.
        beside: of each class, the classes that it is cabled to.
    """

    of: Ints
    size: Ints
    is_leaf: Mask
    passes: Mask
    beside: list[list[int]]


def _joining(is_leaf: Mask, source: Ints, target: Ints) -> Mask:
    """The leaves without which some switches without hosts, and what hangs on them, would not be joined."""
    inner = ~is_leaf[source] & ~is_leaf[target]
    component = components(len(is_leaf), source[inner], target[inner])
    down = is_leaf[target] & ~is_leaf[source]
    part, leaf = np.divmod(
        np.unique(component[source[down]].astype(np.int64) * len(is_leaf) + target[down]), len(is_leaf)
    )
    several = np.bincount(part, minlength=len(is_leaf))[part] > 1
    part, leaf = part[several], leaf[several]
    joining = np.zeros(len(is_leaf), np.bool_)
    # As a rule all switches without hosts hang together, and nothing is left to find.
    if len(np.unique(leaf)) < len(leaf):
        joining[:] = articulation_points(2 * len(is_leaf), leaf, len(is_leaf) + part)[: len(is_leaf)]
    return joining


def _classes(is_leaf: Mask, passes: Mask, source: Ints, target: Ints) -> _Classes:
    # A number a cable, so that parallel ones fall together.
    near, far = np.divmod(np.unique(source.astype(np.int64) * len(is_leaf) + target), len(is_leaf))
    first = np.searchsorted(near, np.arange(len(is_leaf) + 1))
    known: dict[tuple[bool, bool, bytes], int] = {}
    of = np.empty(len(is_leaf), np.int32)
    members: list[int] = []
    for switch, (leaf, through) in enumerate(zip(is_leaf.tolist(), passes.tolist(), strict=True)):
        key = leaf, through, far[first[switch] : first[switch + 1]].tobytes()
        of[switch] = known.setdefault(key, len(known))
        if of[switch] == len(members):
            members.append(switch)
    return _Classes(
        of=of,
        size=np.bincount(of, minlength=len(members)).astype(np.int32),
        is_leaf=is_leaf[members],
        passes=passes[members],
        beside=[np.unique(of[far[first[each] : first[each + 1]]]).tolist() for each in members],
    )


def _heights(classes: _Classes) -> list[int]:
    """Of each class: 1 for a leaf, else one more than it is away from the nearer end of some shortest way; 0 where it
    is on none."""
    leaves = np.flatnonzero(classes.is_leaf)
    away = _distances(classes, leaves)
    between = away[:, leaves]
    heights: list[int] = classes.is_leaf.astype(int).tolist()
    for alike in leaves[classes.size[leaves] > 1].tolist():
        for switch in classes.beside[alike]:
            if classes.passes[switch]:
                heights[switch] = max(heights[switch], 2)
    for switch in np.flatnonzero(classes.passes).tolist():
        reached = np.flatnonzero(away[:, switch] > 0)
        far = away[reached, switch]
        on_the_way = np.add.outer(far, far) == between[np.ix_(reached, reached)]
        climbed = np.minimum.outer(far, far)[on_the_way]
        if climbed.size:
            heights[switch] = max(heights[switch], 1 + int(climbed.max()))
    return heights


def _distances(classes: _Classes, leaves: NDArray[np.intp]) -> NDArray[np.int16]:
    """Cables from each leaf to each class through switches that pass traffic on, (leaves, classes); -1 for no way."""
    cabled = [switch for switch, beside in enumerate(classes.beside) if beside]
    beside = np.array([each for switch in cabled for each in classes.beside[switch]], np.intp)
    first = np.cumsum([0, *(len(classes.beside[switch]) for switch in cabled)])[:-1]
    # A bit a leaf: all of them search at the same time.
    away = np.full((len(leaves), len(classes.size)), -1, np.int16)
    away[np.arange(len(leaves)), leaves] = 0
    front = np.packbits(away.T == 0, axis=1)
    hops = 0
    while front.any() and len(beside):
        hops += 1
        touched = np.zeros_like(front)
        touched[cabled] = np.bitwise_or.reduceat(front[beside], first, axis=0)
        reached = np.unpackbits(touched, axis=1, count=len(leaves)).T.astype(np.bool_) & (away < 0)
        away[reached] = hops
        front = np.packbits(reached.T & classes.passes[:, None], axis=1)
    return away


def _levels(classes: _Classes, heights: list[int]) -> Ints:
    rank = [height + _ABOVE * _stands_above(switch, classes, heights) for switch, height in enumerate(heights)]
    level = np.zeros(len(rank), np.int32)
    for switch in sorted(range(len(rank)), key=lambda each: rank[each]):
        if rank[switch] <= 1:
            level[switch] = int(rank[switch])
        else:
            below = (level[each] for each in classes.beside[switch] if rank[each] < rank[switch])
            level[switch] = 1 + max([1, *below])
    return level


def _stands_above(switch: int, classes: _Classes, heights: list[int]) -> bool:
    """Whether a switch has one switch below it, and is cabled to one of its height that has several others."""
    mine = _below(switch, classes, heights)
    if heights[switch] < 2 or classes.size[list(mine)].sum() != 1:
        return False
    equals = (each for each in classes.beside[switch] if heights[each] == heights[switch])
    theirs = [_below(each, classes, heights) for each in equals]
    return any(classes.size[list(those)].sum() > 1 and not those & mine for those in theirs)


def _below(switch: int, classes: _Classes, heights: list[int]) -> set[int]:
    return {each for each in classes.beside[switch] if 0 < heights[each] < heights[switch]}
