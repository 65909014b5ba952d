"""Explains slow flows by the fewest parts of the network that they have in common."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from hpctrain.control.topology.fabric import Floats

Kind = Literal["fabric", "host", "adapter", "link", "flow"]
Direction = Literal["both", "sends", "receives"]

# Of two parts that explain the same flows the wider one is named, since any part of it may be the cause.
_WIDEST_FIRST: tuple[Kind, ...] = ("host", "adapter", "link")
# Sending and receiving that differ by no more than this have one cause.
_ALIKE = 0.7


@dataclass(frozen=True, kw_only=True)
class Suspect:
    """A part of the network that may slow down the flows through it; a link, which has one direction, has ``both``."""

    kind: Kind
    name: str
    direction: Direction = "both"

    def __str__(self) -> str:
        return f"{self.kind} {self.name}" + ("" if self.direction == "both" else f" {self.direction}")


@dataclass(frozen=True, kw_only=True)
class Fault:
    """A part of the network that is slower than the rest, or for the kind ``fabric`` the whole network.

    Attributes:
        kind: ``flow`` where both ends and every link between them do well with others, or where measurements cannot
            show which of them is slow: these are then the alternatives.
        reached: the median of its slow flows, as a share of the usual bandwidth.
        flows: the number of flows that it explains.
        direction: ``sends`` or ``receives`` for a host or an adapter that is slow in one direction only.
        alternatives: other parts that explain the same flows as well.
    """

    kind: Kind
    name: str
    reached: float
    flows: int
    direction: Direction = "both"
    alternatives: tuple[str, ...] = ()

    def __str__(self) -> str:
        many = "1 flow" if self.flows == 1 else f"{self.flows} flows"
        promise = "what its links carry" if self.kind == "fabric" else "the usual bandwidth"
        reached = f"{self.reached:.0%}" if self.reached >= 0.01 else "less than 1%"
        verb = ":" if self.direction == "both" else f" {self.direction} at"
        text = f"{self.kind} {self.name}{verb} {reached} of {promise} ({many})"
        if not self.alternatives:
            return text
        others = "the link between them, or one of its ends" if self.kind == "flow" else None
        return f"{text}; {others or 'or ' + ', '.join(self.alternatives)}"


# The parts that may be the cause, the most probable first, and the flows that they explain.
_Cause = tuple[list[Suspect], frozenset[int]]


def explain(
    reached: Floats, least: float, suspects: Sequence[Collection[Suspect]], names: Sequence[str]
) -> list[Fault]:
    """The faults that explain the slow flows, those of most flows first.

    Every part that a good flow used is innocent. Of the other parts, the fewest that together explain all slow flows
    are named.

    Args:
        reached: per flow, the share of the usual value.
        least: a flow is slow below this share.
        suspects: per flow, the parts that it used.
        names: per flow, its name as a fault where all of its parts are innocent.
    """
    slow = np.flatnonzero(reached < least).tolist()
    innocent = {suspect for flow in np.flatnonzero(reached >= least).tolist() for suspect in suspects[flow]}
    through: dict[Suspect, set[int]] = defaultdict(set)
    for flow in slow:
        for suspect in set(suspects[flow]) - innocent:
            through[suspect].add(flow)
    causes: list[_Cause] = [(_with_flow(alike), flows) for alike, flows in _smallest_cover(through)]
    alone = set(slow).difference(*through.values())
    causes += [([Suspect(kind="flow", name=names[flow])], frozenset((flow,))) for flow in alone]

    def share(flows: Collection[int]) -> float:
        return float(np.median(reached[sorted(flows)]))

    return [
        Fault(
            kind=first.kind,
            name=first.name,
            reached=share(flows),
            flows=len(flows),
            direction=first.direction,
            alternatives=tuple(map(str, others)),
        )
        for (first, *others), flows in sorted(
            _joined(causes, share), key=lambda cause: (-len(cause[1]), str(cause[0][0]))
        )
    ]


def _smallest_cover(through: Mapping[Suspect, Collection[int]]) -> Iterator[tuple[list[Suspect], frozenset[int]]]:
    """Groups of parts that explain the same flows, with these flows; the groups together explain every flow."""
    unexplained = set().union(*through.values())
    while unexplained:
        alike: dict[frozenset[int], list[Suspect]] = defaultdict(list)
        for suspect, flows in through.items():
            alike[frozenset(flows) & unexplained].append(suspect)
        # A part whose flows are all explained by a wider one is never needed.
        largest = [flows for flows in alike if not any(flows < others for others in alike)]
        explained_by = Counter(flow for flows in largest for flow in flows)
        proven = [flows for flows in largest if any(explained_by[flow] == 1 for flow in flows)]
        # Where every flow has several explanations left, the one with most flows is taken.
        for flows in proven or [min(largest, key=lambda flows: (-len(flows), *map(_rank, _sorted(alike[flows]))))]:
            yield _sorted(alike[flows]), flows
            unexplained -= flows


def _rank(suspect: Suspect) -> tuple[int, str, str]:
    return _WIDEST_FIRST.index(suspect.kind), suspect.name, suspect.direction


def _sorted(suspects: Collection[Suspect]) -> list[Suspect]:
    return sorted(suspects, key=_rank)


def _with_flow(alike: Sequence[Suspect]) -> list[Suspect]:
    """The parts; before a sender and a receiver that explain the same flows, the flow between them."""
    widest = [suspect for suspect in alike if suspect.kind == alike[0].kind]
    if sorted(suspect.direction for suspect in widest) != ["receives", "sends"]:
        return list(alike)
    target, source = sorted(widest, key=lambda suspect: suspect.direction)
    return [Suspect(kind="flow", name=f"{source.name} -> {target.name}"), source, target, *alike[2:]]


def _joined(causes: Sequence[_Cause], share: Callable[[Collection[int]], float]) -> Iterator[_Cause]:
    """The causes; sending and receiving of one part at about the same share become one cause."""
    parts: dict[tuple[Kind, str], list[_Cause]] = defaultdict(list)
    for suspects, flows in causes:
        parts[suspects[0].kind, suspects[0].name].append((suspects, flows))
    for (kind, name), same_part in parts.items():
        shares = [share(flows) for _, flows in same_part]
        if len(same_part) > 1 and min(shares) >= _ALIKE * max(shares):
            others = dict.fromkeys(other for suspects, _ in same_part for other in suspects[1:])
            yield [Suspect(kind=kind, name=name), *others], frozenset().union(*(flows for _, flows in same_part))
        else:
            yield from same_part
