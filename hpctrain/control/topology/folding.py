"""Folds a fabric until it fits a page: boxes of similar hosts and switches, and the cables between them."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from hpctrain.control.topology.fabric import Fabric, Ints
from hpctrain.control.topology.names import natural_key

# The most boxes in a row that are still readable.
MOST_IN_A_ROW = 40
_SWEEPS = 4


@dataclass(frozen=True, kw_only=True)
class DrawnBox:
    """Hosts (level 0), or switches of one level, that are drawn as one box.

    Attributes:
        members: numbers of hosts at level 0, else of nodes.
        names: the names of the members, in natural order.
    """

    level: int
    members: tuple[int, ...]
    names: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Bundle:
    """All cables between two boxes; ``links`` are their directed links, both ways. ``lower`` may equal ``upper``."""

    lower: int
    upper: int
    links: Ints

    @property
    def cables(self) -> int:
        return len(self.links) // 2


@dataclass(frozen=True, kw_only=True)
class Folded:
    """Boxes, by level and then from left to right, and the bundles between them."""

    boxes: tuple[DrawnBox, ...]
    bundles: tuple[Bundle, ...]

    def row(self, level: int) -> list[int]:
        """The boxes of a level."""
        return [number for number, box in enumerate(self.boxes) if box.level == level]

    @cached_property
    def box_of_host(self) -> dict[int, int]:
        """The box of each host."""
        return {host: number for number in self.row(0) for host in self.boxes[number].members}

    def above(self, number: int) -> list[tuple[int, Bundle]]:
        """The boxes that a box is cabled to, one level up or higher."""
        level = self.boxes[number].level
        return [(b.upper, b) for b in self.bundles if b.lower == number and self.boxes[b.upper].level > level]


def fold(fabric: Fabric, hosts: Sequence[int], *, through: Iterable[int] = (), most: int = MOST_IN_A_ROW) -> Folded:
    """Fold a fabric's hosts and every switch above them or among ``through``.

    Each is a separate box where a level has at most ``most`` of them. Larger levels are folded: hosts by the set of
    their leaves, leaves by their hosts or else by the switches above them, higher switches by those below them. A level
    whose members share no such set stays wide.

    Hosts keep the order given unless another order crosses fewer cables.
    """
    part = _ancestry(fabric, hosts) | {node for node in through if fabric.level[node] >= 1}
    rows = _rows(fabric, part, hosts, most)
    neighbours = _box_links(fabric, rows, part)
    order = _ordered_boxes(rows, neighbours, {host: place for place, host in enumerate(hosts)})
    number = {old: new for new, old in enumerate(order)}
    bundles: dict[tuple[int, int], list[int]] = defaultdict(list)
    for (one, other), links in neighbours.items():
        bundles[min(number[one], number[other]), max(number[one], number[other])] += links
    return Folded(
        boxes=tuple(rows[old] for old in order),
        bundles=tuple(
            Bundle(lower=lower, upper=upper, links=np.array(sorted(links), np.int32))
            for (lower, upper), links in sorted(bundles.items())
        ),
    )


def _ancestry(fabric: Fabric, hosts: Sequence[int]) -> set[int]:
    """The hosts' adapters and every switch on an upward path from them."""
    found = np.isin(fabric.host, np.asarray(hosts, np.int32))
    for level in range(int(fabric.level.max())):
        upwards = found[fabric.source] & (fabric.level[fabric.source] == level) & (fabric.level[fabric.target] > level)
        found[fabric.target[upwards]] = True
    return set(np.flatnonzero(found).tolist())


def _rows(fabric: Fabric, part: set[int], hosts: Sequence[int], most: int) -> list[DrawnBox]:
    """The boxes, level by level; their order inside a level is not settled yet."""
    above: dict[int, set[int]] = defaultdict(set)
    below: dict[int, set[int]] = defaultdict(set)
    for source, target in zip(fabric.source.tolist(), fabric.target.tolist(), strict=True):
        if source in part and target in part and fabric.level[source] < fabric.level[target]:
            above[source].add(target)
            below[target].add(source)
    boxes: list[DrawnBox] = []
    by_level: dict[int, list[int]] = defaultdict(list)
    for node in sorted(part):
        by_level[int(fabric.level[node])].append(node)
    box_of: dict[int, int] = {}
    for level in sorted(by_level.keys() - {0}, reverse=True):
        likenesses = [{node: frozenset(below[node]) for node in by_level[level]}]
        if level == 1:
            of_hosts = {node: frozenset(fabric.host[list(below[node])].tolist()) for node in by_level[level]}
            likenesses = [of_hosts, {node: frozenset(above[node]) for node in by_level[level]}]
        # One box of all leaves would hide every crossing.
        for members in _groups(by_level[level], likenesses, most=most, least=2 if level == 1 else 1):
            box_of.update(dict.fromkeys(members, len(boxes)))
            boxes.append(_box(level, members, fabric.names))
    of_leaves = {host: frozenset(box_of[leaf] for leaf in fabric.leaves[host]) for host in hosts}
    return boxes + [_box(0, members, fabric.hosts) for members in _groups(hosts, [of_leaves], most=most)]


def _groups(
    members: Sequence[int], likenesses: Iterable[Mapping[int, frozenset[int]]], *, most: int, least: int = 1
) -> list[list[int]]:
    """Single members if they are at most ``most``, else groups of equals by the first likeness that suffices."""
    groups = [[member] for member in members]
    for likeness in likenesses:
        if len(groups) <= most:
            break
        alike: dict[frozenset[int], list[int]] = defaultdict(list)
        for member in members:
            alike[likeness[member]].append(member)
        if len(alike) >= least:
            groups = min(groups, list(alike.values()), key=len)
    return groups


def _box(level: int, members: Iterable[int], names: Sequence[str]) -> DrawnBox:
    ordered = sorted(members, key=lambda member: natural_key(names[member]))
    return DrawnBox(level=level, members=tuple(ordered), names=tuple(names[member] for member in ordered))


def _box_links(fabric: Fabric, boxes: Sequence[DrawnBox], part: set[int]) -> dict[tuple[int, int], list[int]]:
    """The directed links between each two boxes, also inside a box."""
    of_host = {host: number for number, box in enumerate(boxes) if box.level == 0 for host in box.members}
    of_node = {node: number for number, box in enumerate(boxes) if box.level > 0 for node in box.members}
    of_node |= {node: of_host[int(fabric.host[node])] for node in part if fabric.level[node] == 0}
    links: dict[tuple[int, int], list[int]] = defaultdict(list)
    for link, ends in enumerate(zip(fabric.source.tolist(), fabric.target.tolist(), strict=True)):
        if ends[0] in of_node and ends[1] in of_node:
            links[of_node[ends[0]], of_node[ends[1]]].append(link)
    return links


def _ordered_boxes(
    boxes: Sequence[DrawnBox], links: Mapping[tuple[int, int], Sequence[int]], given: Mapping[int, int]
) -> list[int]:
    """The boxes by level, each level ordered by the mean place of its cables' other ends (barycentre method of
    Sugiyama). Hosts and leaves, where rails cross, are ordered several times.
    """
    neighbours: dict[int, dict[int, int]] = defaultdict(dict)
    for (one, other), between in links.items():
        neighbours[one][other] = len(between)
    levels = sorted({box.level for box in boxes})
    rows = {level: [number for number, box in enumerate(boxes) if box.level == level] for level in levels}
    place: dict[int, float] = {}
    for level, row in rows.items():
        row.sort(key=lambda number: natural_key(boxes[number].names[0]))
        if level == 0:
            row.sort(key=lambda number: min(given[host] for host in boxes[number].members))
        _place_row(row, place)

    def sort(level: int, beside: int) -> None:
        def key(number: int) -> float:
            cables = {other: count for other, count in neighbours[number].items() if boxes[other].level == beside}
            total = sum(place[other] * count for other, count in cables.items())
            mean = total / sum(cables.values()) if cables else place[number]
            return round(mean, 6)

        rows[level].sort(key=key)
        _place_row(rows[level], place)

    # Hosts that are cabled to each other without a switch have no row above them.
    for _ in range(_SWEEPS if 1 in rows else 0):
        sort(1, 0)
        sort(0, 1)
    for lower, upper in itertools.pairwise(levels[1:-1]):
        sort(upper, lower)
    return [number for level in levels for number in rows[level]]


def _place_row(row: Sequence[int], place: dict[int, float]) -> None:
    place.update({number: (index + 0.5) / len(row) for index, number in enumerate(row)})
