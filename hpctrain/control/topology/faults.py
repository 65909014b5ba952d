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
Quantity = Literal["bandwidth", "latency"]

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
        reached: the median of its slow flows: a share of the usual bandwidth, or a multiple of the usual latency.
        flows: the number of flows that it explains.
        direction: ``sends`` or ``receives`` for a host or an adapter that is slow in one direction only.
        alternatives: other parts that explain the same flows as well.
    """

    kind: Kind
    name: str
    quantity: Quantity
    reached: float
    flows: int
    direction: Direction = "both"
    alternatives: tuple[str, ...] = ()

    def __str__(self) -> str:
        many = "1 flow" if self.flows == 1 else f"{self.flows} flows"
        if self.quantity == "latency":
            measured = f": {self.reached:.1f} times the usual latency"
        else:
            promise = "what its links carry" if self.kind == "fabric" else "the usual bandwidth"
            reached = f"{self.reached:.0%}" if self.reached >= 0.01 else "less than 1%"
            measured = f"{':' if self.direction == 'both' else f' {self.direction} at'} {reached} of {promise}"
        return f"{self.kind} {self.name}{measured} ({many}){self._doubt}"

    @property
    def _doubt(self) -> str:
        if not self.alternatives:
            return ""
        if self.kind == "flow":
            return "; the link between them, or one of its ends"
        return f"; or {', '.join(self.alternatives)}"


def explain(
    reached: Floats, least: float, suspects: Sequence[Collection[Suspect]], names: Sequence[str], quantity: Quantity
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
    causes = [_cause(alike, flows, reached) for alike, flows in _smallest_cover(through)]
    alone = set(slow).difference(*through.values())
    causes += [_Cause(suspect=Suspect(kind="flow", name=names[flow]), flows={flow}, reached=reached) for flow in alone]
    causes = sorted(_joined(causes), key=lambda cause: (-len(cause.flows), str(cause.suspect)))
    return [cause.fault(quantity) for cause in causes]


@dataclass(frozen=True, kw_only=True)
class _Cause:
    suspect: Suspect
    flows: Collection[int]
    reached: Floats
    alternatives: tuple[Suspect, ...] = ()

    @property
    def share(self) -> float:
        return float(np.median(self.reached[sorted(self.flows)]))

    def fault(self, quantity: Quantity) -> Fault:
        return Fault(
            kind=self.suspect.kind,
            name=self.suspect.name,
            quantity=quantity,
            reached=self.share if quantity == "bandwidth" else 1 / self.share,
            flows=len(self.flows),
            direction=self.suspect.direction,
            alternatives=tuple(map(str, self.alternatives)),
        )


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


def _cause(alike: Sequence[Suspect], flows: Collection[int], reached: Floats) -> _Cause:
    first, *others = alike
    widest = [suspect for suspect in alike if suspect.kind == first.kind]
    if sorted(suspect.direction for suspect in widest) == ["receives", "sends"]:
        target, source = sorted(widest, key=lambda suspect: suspect.direction)
        between = Suspect(kind="flow", name=f"{source.name} -> {target.name}")
        return _Cause(suspect=between, flows=flows, reached=reached, alternatives=(source, target, *alike[2:]))
    return _Cause(suspect=first, flows=flows, reached=reached, alternatives=tuple(others))


def _joined(causes: Sequence[_Cause]) -> Iterator[_Cause]:
    """The causes; sending and receiving of one part at about the same share become one cause."""
    parts: dict[tuple[Kind, str], list[_Cause]] = defaultdict(list)
    for cause in causes:
        parts[cause.suspect.kind, cause.suspect.name].append(cause)
    for (kind, name), same_part in parts.items():
        shares = [cause.share for cause in same_part]
        if len(same_part) > 1 and min(shares) >= _ALIKE * max(shares):
            yield _Cause(
                suspect=Suspect(kind=kind, name=name),
                flows=set().union(*(cause.flows for cause in same_part)),
                reached=same_part[0].reached,
                alternatives=tuple(dict.fromkeys(other for cause in same_part for other in cause.alternatives)),
            )
        else:
            yield from same_part
