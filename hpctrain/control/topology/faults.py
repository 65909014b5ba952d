"""Explains slow flows by the fewest parts of the network that they have in common."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from hpctrain.control.topology.fabric import Floats

Kind = Literal["fabric", "host", "adapter", "link", "flow"]
Direction = Literal["both", "sends", "receives"]

_WIDEST_FIRST: tuple[Kind, ...] = ("host", "adapter", "link")


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
        kind: ``flow`` where both ends and every link between them do well with others.
        reached: the median of its slow flows, as a share of the usual bandwidth.
        flows: the number of flows that it explains.
        direction: in which a host or an adapter is slow, ``sends`` or ``receives``.
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
        return f"{text}; or {', '.join(self.alternatives)}" if self.alternatives else text


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
    alone = set(slow).difference(*through.values())
    causes = [*_smallest_cover(through), *(([Suspect(kind="flow", name=names[flow])], {flow}) for flow in alone)]
    causes.sort(key=lambda cause: (-len(cause[1]), str(cause[0][0])))
    return [
        Fault(
            kind=first.kind,
            name=first.name,
            reached=float(np.median(reached[sorted(flows)])),
            flows=len(flows),
            direction=first.direction,
            alternatives=tuple(map(str, others)),
        )
        for (first, *others), flows in causes
    ]


def _smallest_cover(through: Mapping[Suspect, Collection[int]]) -> Iterator[tuple[list[Suspect], set[int]]]:
    """Groups of parts that explain the same flows, with these flows; the groups together explain every flow.

    The first part of a group is the widest, since any part of it may be the cause.
    """
    unexplained = set().union(*through.values())
    while unexplained:
        alike: dict[frozenset[int], list[Suspect]] = defaultdict(list)
        for suspect in sorted(through, key=_rank):
            alike[frozenset(through[suspect]) & unexplained].append(suspect)
        # A part whose flows are all explained by a wider one is never needed.
        largest = [flows for flows in alike if not any(flows < others for others in alike)]
        explained_by = Counter(flow for flows in largest for flow in flows)
        proven = [flows for flows in largest if any(explained_by[flow] == 1 for flow in flows)]
        # Where every flow has several explanations left, the one with most flows is taken.
        for flows in proven or [min(largest, key=lambda flows: (-len(flows), *map(_rank, alike[flows])))]:
            yield alike[flows], set(flows)
            unexplained -= flows


def _rank(suspect: Suspect) -> tuple[int, str, str]:
    return _WIDEST_FIRST.index(suspect.kind), suspect.name, suspect.direction
